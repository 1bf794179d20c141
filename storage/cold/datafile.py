"""Look at a segment file before LMDB maps it.

LMDB trusts its files: a damaged one can kill the process (an assertion, SIGSEGV, SIGBUS), and opening a file writable
resizes it to the map size. So everything that decides whether a file may be handed to LMDB is read here, with plain
file reads: is it an LMDB 0.9 data file, is it whole, is it one of ours. `verify_tree` goes further and walks every
page LMDB would follow; it is for files that were not closed or synced cleanly.

Page and meta structures are those of LMDB's data format version 1 on a 64-bit little-endian machine.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import lmdb.verify

__all__ = ["HEAD_BYTES", "PAGE_BYTES", "DatabaseNames", "Unusable", "check_file", "read_metas", "verify_tree"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, address, map size
_DATABASE = struct.Struct(
    "<IHHQQQQQ"
)  # pad (page size in the first), flags, depth, branch, leaf, overflow, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction id
HEAD_BYTES = _PAGE.size + _META.size + 2 * _DATABASE.size + _TAIL.size
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META_PAGE = 0x08

DatabaseNames = tuple[bytes, ...]


class Unusable(Exception):
    """A file that must not be opened as a segment.

    Parameters
    ----------
    cause
        A short stable word for the metric label.
    reason
        A sentence for people.
    """

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


def check_file(path: Path, names: DatabaseNames) -> int:
    """Return the map size of a segment file, in bytes.

    Parameters
    ----------
    names
        Named databases that tell our files from other people's LMDB files.

    Raises
    ------
    Unusable
        The file is not LMDB, not whole, of another format, or somebody else's.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Unusable("foreign", "it is not a regular file")
    with path.open("rb") as file:
        older, newer = sorted(read_metas(file.fileno()), key=lambda meta: meta[2])
        map_bytes, last_page, transaction, root = newer
        if transaction != older[2] + 1:
            raise Unusable("header", "its two headers do not follow each other")
        if status.st_size != map_bytes:
            raise Unusable("truncated", f"it has {status.st_size} bytes where its header says {map_bytes}")
        if last_page * PAGE_BYTES >= map_bytes:
            raise Unusable("header", "its header points beyond its end")
        if not 2 <= root <= last_page:
            raise Unusable("foreign", "it is an LMDB file without our databases")
        file.seek(root * PAGE_BYTES)
        page = file.read(PAGE_BYTES)
        if not all(name in page for name in names):
            raise Unusable("foreign", "it is an LMDB file without our databases")
    return map_bytes


def read_metas(fd: int) -> list[tuple[int, int, int, int]]:
    """Return map size, last page, transaction id and main root of both meta pages, or raise `Unusable`."""
    return [_read_meta(os.pread(fd, PAGE_BYTES, number * PAGE_BYTES), number) for number in (0, 1)]


def _read_meta(page: bytes, number: int) -> tuple[int, int, int, int]:
    """Return map size, last page, transaction id and main root of one of the two meta pages."""
    if len(page) < PAGE_BYTES:
        raise Unusable("truncated", "it is shorter than an LMDB header")
    page_number, _, flags, _, _ = _PAGE.unpack_from(page)
    offset = _PAGE.size
    magic, version, _, map_bytes = _META.unpack_from(page, offset)
    if magic != _MAGIC or page_number != number or not flags & _META_PAGE:
        raise Unusable("not-lmdb", "it is not an LMDB file, or its header is damaged")
    if version != _DATA_VERSION:
        raise Unusable("version", f"its LMDB data format is {version}, not {_DATA_VERSION}")
    offset += _META.size
    page_bytes = _DATABASE.unpack_from(page, offset)[0]
    if page_bytes != PAGE_BYTES:
        raise Unusable("version", f"it was made with pages of {page_bytes} bytes, here they have {PAGE_BYTES}")
    root = _DATABASE.unpack_from(page, offset + _DATABASE.size)[-1]
    last_page, transaction = _TAIL.unpack_from(page, offset + 2 * _DATABASE.size)
    return map_bytes, last_page, transaction, root


def verify_tree(path: Path) -> None:
    """Raise `Unusable` unless every page LMDB could follow in a data file is sound.

    Reads the trees and one page per value, without LMDB: about 100,000 values a second.
    """
    try:
        problems: list[str] = lmdb.verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
    except (lmdb.verify.VerifyError, OSError, struct.error, IndexError, ValueError) as error:
        raise Unusable("torn", f"its structure cannot be read: {error}") from error
    if problems:
        raise Unusable("torn", f"its structure is damaged in {len(problems)} places, the first: {problems[0]}")
