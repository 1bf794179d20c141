"""One segment: an LMDB environment in one file of fixed, reserved size.

A segment is filled from front to back and emptied as a whole. Its databases:

    tierkv.header   "segment" -> format version, sequence number (0: empty); "reserve" -> see `RESERVE_FRACTION`
    tierkv.index    ordinal -> record (`tierkv.storage.cold.record`)
    tierkv.blocks   ordinal -> container

Ordinals count up from 0 (big-endian), so both trees are appended to: their pages are full, and a reload reads blocks
in the order they were stored. Deleting a block deletes its record only; the space of its value comes back when the
segment is emptied.

Not thread-safe by itself: the tier allows one writer at a time, and empties or closes a segment only when nobody reads
it. Reading, `sync` and one writer may go on side by side.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import lmdb

from tierkv.errors import StorageError, StorageFull
from tierkv.storage.cold import record
from tierkv.storage.cold.datafile import HEAD_BYTES, PAGE_BYTES, Unusable, check_file, verify_tree
from tierkv.storage.cold.trees import check_trees
from tierkv.storage.tier import BlockMeta, Buffer

__all__ = ["DATABASES", "FORMAT_VERSION", "Segment", "footprint", "is_damage", "read_sequence", "stored_bytes"]

FORMAT_VERSION = 1

# LMDB notes the pages freed by emptying a segment in one list of 8 bytes a page, in contiguous pages that must be free
# at that moment. A value of that size holds them until then; without it, a full segment cannot be emptied.
RESERVE_FRACTION = 512
SPARE_PAGES = 32  # copy-on-write of the trees' paths, deletes in a full segment

_MAX_READERS = 512
_HEADER = struct.Struct("<8sII")  # magic, format version, sequence
_MAGIC = b"tierkv\x00s"
_SEGMENT, _RESERVE = b"segment", b"reserve"
DATABASES = (b"tierkv.header", b"tierkv.index", b"tierkv.blocks")
_ORDINAL = struct.Struct(">I")
_FORGOTTEN_AT_ONCE = 128  # records next to each other; they lie on 6 or 7 pages
_INDEX_BYTES = 256  # of index and tree pages per block, rounded up
_LOCK_BYTES = 64 * 1024


def footprint(size: int) -> int:
    """Return the disk a segment of `size` bytes can ever take: its file, the file system's map of it, its lock file."""
    return size + size // 256 + _LOCK_BYTES


def stored_bytes(container: int) -> int:
    """Return the bytes of a segment that a container of this length takes, in whole pages and with its index."""
    return -(-(container + 16) // PAGE_BYTES) * PAGE_BYTES + _INDEX_BYTES


def read_sequence(txn: Any, header: Any) -> int:
    """Return the sequence number in a segment's header database. Raises `Unusable` for one of another format."""
    magic, version, sequence = _HEADER.unpack(txn.get(_SEGMENT, db=header) or b"")
    if magic != _MAGIC:
        raise Unusable("foreign", "its header is not tierkv's")
    if version != FORMAT_VERSION:
        raise Unusable("version", f"its format is {version}, this tierkv knows {FORMAT_VERSION}")
    return int(sequence)


def is_damage(error: Exception) -> bool:
    """Say whether an error means that the file is damaged, not that the system refused or that there is no room."""
    damaged = isinstance(error, lmdb.Error) and getattr(error, "code", 0) < 0
    return isinstance(error, Unusable) or (damaged and not isinstance(error, lmdb.MapFullError))


class Segment:
    """An open segment file. Made by `create` or `open`.

    Attributes
    ----------
    path, size
        The data file and its size in bytes.
    sequence
        Position in the order of filling; 0 while empty.
    blocks
        Live blocks; kept by the tier.
    readers
        Threads inside; kept by the tier.
    unsynced
        Written to since the last `settle`. Marked on disk too, so that a restart knows what to distrust.
    """

    def __init__(self, path: Path, size: int, *, synchronous: bool) -> None:
        self.path = path
        self.size = size
        self.sequence = 0
        self.blocks = 0
        self.readers = 0
        self.unsynced = False
        self._marker = path.with_suffix(".unsynced")
        self._marking = Lock()
        self._writes = 0
        self._next_ordinal = 0
        self._full = False
        _reserve_lock(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._env = lmdb.open(
                str(path),
                map_size=size,
                subdir=False,
                writemap=True,
                sync=synchronous,
                max_dbs=len(DATABASES),
                max_readers=_MAX_READERS,
                mode=0o600,
                lib_version=0,
            )
        except BaseException:
            os.close(self._fd)
            raise

    @classmethod
    def create(cls, path: Path, size: int, *, synchronous: bool) -> Segment:
        """Make an empty segment with all of its disk space reserved.

        Raises `StorageFull` when the disk has no room, `StorageError` when it refuses; nothing is left behind then.
        """
        unfinished = path.with_suffix(".new")
        try:
            made = cls(unfinished, size, synchronous=synchronous)
            try:
                _reserve_space(unfinished, size)
                made._open_databases(create=True)
                made._write_header(0)
                made._env.sync(True)
            finally:
                made.close()
            _lock_file(unfinished).rename(_lock_file(path))
            unfinished.rename(path)
            return cls.open(path, synchronous=synchronous)
        except (OSError, lmdb.Error, Unusable) as error:
            for file in (unfinished, _lock_file(unfinished)):
                file.unlink(missing_ok=True)
            raise _storage_error(f"segment {path} cannot be created", error) from error

    @classmethod
    def open(cls, path: Path, *, synchronous: bool) -> Segment:
        """Open an existing segment file. Raises `Unusable`, leaving the file as it is, when it must not be used."""
        marker = path.with_suffix(".unsynced")
        suspect = marker.exists()
        opened: Segment | None = None
        try:
            size = check_file(path, DATABASES)
            if suspect:
                verify_tree(path)
            else:
                check_trees(path, DATABASES)
            if path.stat().st_blocks * 512 < size:
                _reserve_space(path, size)
            # Until it has been read whole it is suspect: should LMDB die on it, the next start verifies it first.
            marker.touch(mode=0o600)
            opened = cls(path, size, synchronous=synchronous)
            opened.unsynced = suspect
            opened._open_databases(create=False)
            opened._read_header()
        except (OSError, lmdb.Error, struct.error, Unusable) as error:
            if opened is not None:
                opened.close()
            if not suspect:
                marker.unlink(missing_ok=True)
            if isinstance(error, Unusable):
                raise
            raise Unusable("unreadable", f"it cannot be opened: {error}") from error
        return opened

    def _open_databases(self, *, create: bool) -> None:
        self._header, self._index, self._blocks = (self._env.open_db(name, create=create) for name in DATABASES)
        self._known_heads = self._heads()

    def _read_header(self) -> None:
        with self._begin() as txn:
            sequence = read_sequence(txn, self._header)
            cursor = txn.cursor(self._blocks)
            last = int.from_bytes(cursor.key(), "big") if cursor.last() else -1
        self.sequence = sequence
        self._next_ordinal = last + 1

    def _write_header(self, sequence: int, *, reserve: bool = False) -> None:
        with self._write() as txn:
            txn.put(_SEGMENT, _HEADER.pack(_MAGIC, FORMAT_VERSION, sequence), db=self._header)
            if reserve:
                txn.put(_RESERVE, bytes(self.size // RESERVE_FRACTION + SPARE_PAGES * PAGE_BYTES), db=self._header)
        self.sequence = sequence

    def check_place(self) -> None:
        """Raise `Unusable` unless the file is still whole and where it was. Two system calls.

        A write into a map whose file was cut short is a SIGBUS, and one into a file that was deleted is lost.
        """
        self._check_size()
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise Unusable("removed", "somebody deleted or renamed it") from None
        if not os.path.samestat(there, os.fstat(self._fd)):
            raise Unusable("replaced", "another file lies in its place")

    def check_trees(self) -> None:
        """Raise `Unusable` unless what LMDB follows in the file is sound. Nobody may be writing. Blocks on reads."""
        self.check_place()
        check_file(self.path, DATABASES)
        check_trees(self.path, DATABASES, values=True)

    def _begin(self, **options: Any) -> Any:
        """Begin a transaction, unless the file was cut short: touching the map would be a SIGBUS (`Unusable`)."""
        self._check_size()
        return self._env.begin(**options)

    @contextmanager
    def _write(self) -> Iterator[Any]:
        """A write transaction, unless the file is not as the last one left it (`Unusable`).

        LMDB starts from the headers in its map, and dies of impossible ones.
        """
        self.check_place()
        if self._heads() != self._known_heads:
            raise Unusable("header", "its header was changed by somebody else")
        with self._env.begin(write=True) as txn:
            yield txn
        self._known_heads = self._heads()

    def _heads(self) -> list[bytes]:
        return [os.pread(self._fd, HEAD_BYTES, number * PAGE_BYTES) for number in (0, 1)]

    def _check_size(self) -> None:
        nbytes = os.fstat(self._fd).st_size
        if nbytes != self.size:
            raise Unusable("truncated", f"it has {nbytes} bytes now, not {self.size}")

    def begin(self, sequence: int) -> None:
        """Turn an empty segment into the one being filled, number `sequence`."""
        self._mark()
        self._write_header(sequence, reserve=True)
        self._next_ordinal = 0
        self._full = False

    @property
    def fresh(self) -> bool:
        """Whether nothing was stored since `begin`."""
        return self._next_ordinal == 0

    def room(self) -> int:
        """Return how many `stored_bytes` still fit, 0 once an `append` found less (free pages need not be adjacent)."""
        if self._full:
            return 0
        with self._begin() as txn:
            stats = [txn.stat(db) for db in (self._header, self._index, self._blocks)]
        used = sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)
        return self.size - (used + SPARE_PAGES) * PAGE_BYTES

    def stored_bytes(self) -> int:
        """Return the bytes of the pages that hold containers."""
        with self._begin() as txn:
            stat = txn.stat(self._blocks)
        return PAGE_BYTES * int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])

    def append(self, items: Sequence[tuple[bytes, BlockMeta, Buffer]]) -> list[bytes]:
        """Store containers in one transaction; return their index records.

        Raises `lmdb.MapFullError` when they do not fit; nothing is stored then.
        """
        self._mark()
        try:
            rows = self._append(items)
        except lmdb.MapFullError:
            self._full = True
            raise
        self._next_ordinal += len(items)
        return rows

    def _append(self, items: Sequence[tuple[bytes, BlockMeta, Buffer]]) -> list[bytes]:
        rows = []
        with self._write() as txn:
            for ordinal, (key, meta, container) in enumerate(items, self._next_ordinal):
                at = _ORDINAL.pack(ordinal)
                row = record.encode(key, meta, self.sequence, ordinal)
                stored = txn.put(at, container, append=True, db=self._blocks)
                if not stored or not txn.put(at, row, append=True, db=self._index):
                    raise Unusable("torn", "it holds an ordinal higher than the last one given out")
                rows.append(row)
        return rows

    @contextmanager
    def values(self) -> Iterator[Callable[[int], memoryview | None]]:
        """Lend containers by ordinal (None: no such one), in place, valid inside the context only."""
        with self._begin(db=self._blocks, buffers=True) as txn:
            yield lambda ordinal: txn.get(_ORDINAL.pack(ordinal))

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield ordinals, as 4 big-endian bytes, and index records in the order they were stored."""
        with self._begin() as txn:
            yield from txn.cursor(self._index)

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete index records, so that the blocks do not come back at a restart."""
        self._mark()
        try:
            self._delete_records(ordinals)
        except lmdb.MapFullError:
            # Nothing else has a free page left; the price is that emptying this segment may have to recreate it.
            with self._write() as txn:
                txn.delete(_RESERVE, db=self._header)
            self._write_header(self.sequence)
            self._delete_records(ordinals)

    def _delete_records(self, ordinals: Sequence[int]) -> None:
        # A transaction writes each page of the tree it touches anew, and a full segment has few pages to spare.
        for _, near in groupby(sorted(ordinals), lambda ordinal: ordinal // _FORGOTTEN_AT_ONCE):
            with self._write() as txn:
                for ordinal in near:
                    txn.delete(_ORDINAL.pack(ordinal), db=self._index)

    def empty(self) -> None:
        """Forget everything at once. Nobody may be reading. Raises `lmdb.MapFullError` when only recreating helps."""
        self._mark()
        with self._write() as txn:
            txn.delete(_RESERVE, db=self._header)
        # LMDB reuses a page two transactions after the one that freed it.
        self._write_header(self.sequence)
        with self._write() as txn:
            txn.drop(self._blocks, delete=False)
            txn.drop(self._index, delete=False)
            txn.put(_SEGMENT, _HEADER.pack(_MAGIC, FORMAT_VERSION, 0), db=self._header)
        self._write_header(0)
        self.blocks = 0

    def sync(self, *, settle: bool) -> None:
        """Write everything to disk. Blocks.

        With `settle` the segment then counts as safe, unless it was written to meanwhile; not for the one being filled,
        whose next write would only have to mark it again.
        """
        writes = self._writes
        self._env.sync(True)
        with self._marking:
            if settle and writes == self._writes:
                self._unmark()

    def settle(self) -> None:
        """Count a segment as safe that was so when it was opened and has been read whole since."""
        with self._marking:
            if not self.unsynced:
                self._unmark()

    def close(self) -> None:
        """Close the environment. Nobody may be using it. Its lock file stays: later there may be no room for one."""
        self._env.close()
        os.close(self._fd)

    def remove(self) -> None:
        """Close the segment and delete its files; what somebody else put in their place stays."""
        try:
            self.check_place()
            ours = True
        except Unusable as error:
            ours = error.cause == "truncated"
        self.close()
        if ours:
            self.delete_files(self.path)
        else:
            self.delete_lock(self.path)
            self._marker.unlink(missing_ok=True)

    @staticmethod
    def delete_files(path: Path) -> None:
        """Delete a segment file that is not open, and what lies beside it."""
        for file in (path, _lock_file(path), path.with_suffix(".unsynced")):
            file.unlink(missing_ok=True)

    @staticmethod
    def delete_lock(path: Path) -> None:
        """Delete the lock file of a segment that is not open and will not be used."""
        _lock_file(path).unlink(missing_ok=True)

    def _mark(self) -> None:
        with self._marking:
            self._writes += 1
            if not self.unsynced:
                self._marker.touch(mode=0o600)
                _sync_directory(self.path.parent)
                self.unsynced = True

    def _unmark(self) -> None:
        self._marker.unlink(missing_ok=True)
        self.unsynced = False


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reserve_lock(path: Path) -> None:
    """LMDB maps its lock file too: without disk behind it the first touch is a SIGBUS."""
    fd = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_BYTES)
    finally:
        os.close(fd)


def _reserve_space(path: Path, size: int) -> None:
    free = os.statvfs(path)
    missing = size - path.stat().st_blocks * 512
    if missing > free.f_bavail * free.f_frsize:
        raise OSError(errno.ENOSPC, f"{missing} bytes are needed, {free.f_bavail * free.f_frsize} are free")
    fd = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _storage_error(what: str, error: OSError | lmdb.Error | Unusable) -> StorageError:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    full = full or (isinstance(error, lmdb.Error) and error.code == errno.ENOSPC)
    if full:
        return StorageFull(f"{what}: {error}", remedy="free disk space, or lower the cold tier's capacity")
    return StorageError(f"{what}: {error}", remedy="check that the directory can be written and its disk is healthy")
