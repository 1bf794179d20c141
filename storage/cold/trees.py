"""Look at the trees of a segment file as LMDB would follow them, without LMDB and without reading values.

LMDB checks little of what it finds in a page: a wrong flag in a node is a NULL pointer to it, a leaf that is no leaf an
assertion that ends the process. This reads the pages that lead to the values, a few in a thousand of a file, and
refuses a file in which one could not have been written by LMDB. What the values hold, and what the records say, their
own checksums tell.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tierkv.storage.cold.datafile import PAGE_BYTES, Unusable, read_metas

__all__ = ["check_trees"]

_PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # length or child (low, high), flags or child (top), key length
_DATABASE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow, entries, root
_U64 = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG, _SUB = 0x01, 0x02
_EMPTY = (1 << 64) - 1
_DEEPEST = 32
_ORDINAL_BYTES = 4
_HEAD = np.arange(_NODE.size + _ORDINAL_BYTES)


def check_trees(path: Path, names: Sequence[bytes], *, values: bool = False) -> None:
    """Raise `Unusable` unless the main tree and the named ones are sound. Nobody may be writing to the file.

    Reads a page for about 25 records or 180 values. `values`: also the head of each value that has pages of its own,
    which LMDB looks at when it frees them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, last_page, _, root = max(read_metas(fd), key=lambda meta: meta[2])
        walk = _Walk(fd, last_page, values)
        databases = walk.named(root)
        for name in names:
            walk.tree(databases[name])
    except (struct.error, IndexError, KeyError) as error:
        raise Unusable("torn", f"its structure cannot be read: {error!r}") from error
    finally:
        os.close(fd)


class _Walk:
    def __init__(self, fd: int, last_page: int, values: bool) -> None:
        self._fd = fd
        self._last = last_page
        self._values = values
        self._seen: set[int] = set()

    def named(self, root: int) -> dict[bytes, tuple[int, ...]]:
        """Return the records of the named databases; our main tree is one leaf with nothing else in it."""
        found: dict[bytes, tuple[int, ...]] = {}
        page, nodes = self._page(root, _LEAF)
        for at in nodes:
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            value = at + _NODE.size + key_bytes
            if flags != _SUB or low | high << 16 != _DATABASE.size or value + _DATABASE.size > PAGE_BYTES:
                raise _torn(root)
            found[page[at + _NODE.size : value]] = _DATABASE.unpack_from(page, value)
        return found

    def tree(self, database: tuple[int, ...]) -> None:
        """Check every page of a tree, and that it holds as many entries as its record says."""
        flags, depth, entries, root = database[1], database[2], database[6], database[7]
        if flags or depth > _DEEPEST:
            raise Unusable("torn", "a database of it has impossible settings")
        if root == _EMPTY:
            found = 0
        else:
            level = [root]
            for _ in range(depth - 1):
                level = [child for number in level for child in self._children(number)]
            last = b""
            found = 0
            for number in level:
                last, count = self._leaf(number, last)
                found += count
        if found != entries:
            raise Unusable("torn", f"a database of it has {found} entries where its record says {entries}")

    def _children(self, number: int) -> list[int]:
        page, nodes = self._page(number, _BRANCH)
        if len(nodes) < 2:
            raise _torn(number)
        children = []
        for at in nodes:
            low, high, top, key_bytes = _NODE.unpack_from(page, at)
            if at + _NODE.size + key_bytes > PAGE_BYTES:
                raise _torn(number)
            children.append(low | high << 16 | top << 32)
        return children

    def _leaf(self, number: int, last: bytes) -> tuple[bytes, int]:
        page, nodes = self._page(number, _LEAF)
        alike = self._alike(page, nodes, last)
        if alike is not None:
            return alike, len(nodes)
        for at in nodes:
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            start = at + _NODE.size + key_bytes
            length = low | high << 16
            if flags == _BIG:
                end = start + _U64.size
                (value,) = _U64.unpack_from(page, start)
                inside = self._has_value(value, (length + _PAGE.size - 1) // PAGE_BYTES + 1)
            else:
                end = start + length
                inside = not flags
            key = page[at + _NODE.size : start]
            if not inside or end > PAGE_BYTES or key <= last or (last and len(key) != len(last)):
                raise _torn(number)
            last = key
        return last, len(nodes)

    def _alike(self, page: bytes, nodes: Sequence[int], last: bytes) -> bytes | None:
        """Check a page whose nodes all have one size, as those of our index, at once; return its last key.

        None: they have not, or something is wrong; look at them one by one.
        """
        data, at = np.frombuffer(page, np.uint8), np.array(nodes)
        low, high, flags, key_bytes = _NODE.unpack_from(page, nodes[0])
        size = _NODE.size + key_bytes + low
        if flags or high or key_bytes != _ORDINAL_BYTES or int(at.max()) + size > PAGE_BYTES:
            return None
        heads = data[at[:, None] + _HEAD]
        ordinals = heads[:, _NODE.size :].copy().view(">u4")[:, 0]
        same = (heads[:, : _NODE.size] == heads[0, : _NODE.size]).all()
        rising = (ordinals[1:] > ordinals[:-1]).all() and (not last or int(ordinals[0]) > int.from_bytes(last, "big"))
        return ordinals[-1:].tobytes() if same and rising and len(last) in (0, _ORDINAL_BYTES) else None

    def _has_value(self, number: int, pages: int) -> bool:
        if not 2 <= number <= self._last + 1 - pages:
            return False
        if not self._values:
            return True
        own, _, flags, low, high = _PAGE.unpack(os.pread(self._fd, _PAGE.size, number * PAGE_BYTES))
        return (own, flags, low | high << 16) == (number, _OVERFLOW, pages)

    def _page(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """Return a page and where its nodes begin."""
        if not 2 <= number <= self._last or number in self._seen:
            raise Unusable("torn", f"its page {number} is out of range or in two places")
        self._seen.add(number)
        page = os.pread(self._fd, PAGE_BYTES, number * PAGE_BYTES)
        own, _, flags, lower, upper = _PAGE.unpack_from(page)
        count = (lower - _PAGE.size) // 2
        if own != number or flags != kind or not _PAGE.size < lower <= upper <= PAGE_BYTES or lower % 2:
            raise _torn(number)
        nodes = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if min(nodes) < upper or max(nodes) > PAGE_BYTES - _NODE.size:
            raise _torn(number)
        return page, nodes


def _torn(number: int) -> Unusable:
    return Unusable("torn", f"its page {number} is damaged")
