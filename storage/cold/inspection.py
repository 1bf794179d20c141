"""Look at a cold store that no process has open, without changing anything in it.

What a start would do to find damage is done here by reading alone: headers and trees of every file, all pages of one
that was not closed cleanly, and each index record. Payload is not read.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lmdb

from tierkv.storage.cold import record
from tierkv.storage.cold.datafile import Unusable, check_file, verify_tree
from tierkv.storage.cold.directory import looking_at
from tierkv.storage.cold.segment import DATABASES, read_sequence
from tierkv.storage.cold.trees import check_trees

__all__ = ["SegmentReport", "StoreReport", "inspect_store"]


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment file.

    Attributes
    ----------
    size
        Bytes of the file.
    sequence
        Position in the order of filling, 0 for an empty one.
    clean
        Whether it was synced since the last write: if not, a power loss may have torn it.
    blocks, payload_bytes
        What its index has, before compression.
    broken_records
        Index records that fail their checksum.
    damage
        Why it cannot be used; empty for a sound one.
    """

    name: str
    size: int
    sequence: int = 0
    clean: bool = True
    blocks: int = 0
    payload_bytes: int = 0
    broken_records: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store: its segments in order of filling, and payload bytes and blocks by tenant id and namespace (hex).

    A block that a kill left in two segments counts twice here; the next start drops the older copy.
    """

    path: str
    segments: tuple[SegmentReport, ...]
    payload_by_tenant: Mapping[str, int]
    payload_by_namespace: Mapping[str, int]
    blocks_by_namespace: Mapping[str, int]


def inspect_store(path: Path) -> StoreReport:
    """Report on the store in a directory. Reads all indexes: about half a million blocks a second.

    Raises `NotFound` where there is none, `ForeignStore`, `StorageError`, or `StoreInUse` while a process has it open;
    none can open it meanwhile.
    """
    tenants: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    segments = []
    with looking_at(path) as files:
        for file in files:
            rows: list[bytes] = []
            segments.append(_look(file, rows))
            for row in rows:
                family, nbytes = record.common(row), _length(row)
                tenants[record.tenant(family).hex()] += nbytes
                payload[record.namespace(family).hex()] += nbytes
                blocks[record.namespace(family).hex()] += 1
    segments.sort(key=lambda segment: segment.sequence)
    return StoreReport(str(path), tuple(segments), dict(tenants), dict(payload), dict(blocks))


def _look(file: Path, rows: list[bytes]) -> SegmentReport:
    """Report on one file, and add its whole index records to `rows`."""
    clean = not file.with_suffix(".unsynced").exists()
    size = file.lstat().st_size
    try:
        check_file(file, DATABASES)
        if clean:
            check_trees(file, DATABASES)
        else:
            verify_tree(file)
        sequence, broken = _read(file, size, rows)
    except (OSError, lmdb.Error, struct.error, Unusable) as error:
        cause = error.cause if isinstance(error, Unusable) else "unreadable"
        return SegmentReport(file.name, size, clean=clean, damage=f"{cause}: {error}")
    return SegmentReport(file.name, size, sequence, clean, len(rows), sum(map(_length, rows)), broken)


def _read(file: Path, size: int, rows: list[bytes]) -> tuple[int, int]:
    """Add a sound segment's whole records to `rows`; return its sequence and how many records are broken."""
    # No lock file is made: nobody else has the store open.
    with lmdb.open(
        str(file), map_size=size, subdir=False, readonly=True, lock=False, max_dbs=len(DATABASES), lib_version=0
    ) as env:
        header, index, _ = (env.open_db(name, create=False) for name in DATABASES)
        with env.begin() as txn:
            sequence = read_sequence(txn, header)
            whole, broken = record.sift(txn.cursor(index), sequence)
    rows += whole
    return sequence, len(broken)


def _length(row: bytes) -> int:
    return int.from_bytes(record.payload_length(row), "little")
