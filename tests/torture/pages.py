"""What each page of a segment file is for, so that a test can damage a page of the kind it means."""

from __future__ import annotations

import struct
from pathlib import Path

PAGE = 4096
_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_DATABASE = struct.Struct("<IHHQQQQQ")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUB = 1, 2
_NOWHERE = (1 << 64) - 1
_META_DATABASES = 16 + 24  # a page's header, then magic, version, address and map size

Pages = dict[str, list[int]]


def pages_of(path: Path) -> Pages:
    """Page numbers by kind: ``meta``, ``free``, ``main``, ``index-leaf``, ``blocks-branch`` ..., and ``value``.

    A value's first page is its entry; values are in the order they were stored.
    """
    data = path.read_bytes()
    metas = [data[:PAGE], data[PAGE : 2 * PAGE]]
    newest = max(metas, key=lambda page: struct.unpack_from("<Q", page, _META_DATABASES + 2 * _DATABASE.size + 8)[0])
    free, main = (_DATABASE.unpack_from(newest, _META_DATABASES + n * _DATABASE.size)[-1] for n in (0, 1))
    found: Pages = {"meta": [0, 1]}
    _walk(data, free, "free", found)
    for name, root in _walk(data, main, "main", found).items():
        _walk(data, root, name.removeprefix("tierkv."), found)
    found["value"] = found.pop("blocks-value", [])
    return {kind: pages for kind, pages in found.items() if pages}


def extent(data: bytes | bytearray, page: int) -> tuple[int, int]:
    """Start and end of the bytes of the value that begins on `page`, without its page header."""
    (count,) = struct.unpack_from("<I", data, page * PAGE + 12)
    return page * PAGE + 16, (page + count) * PAGE


def _walk(data: bytes, root: int, name: str, found: Pages) -> dict[str, int]:
    """Note the pages of one tree; return the roots of the named databases in it."""
    roots: dict[str, int] = {}
    todo = [root] if root != _NOWHERE else []
    while todo:
        page = todo.pop()
        at = page * PAGE
        _, _, flags, lower, _ = _HEADER.unpack_from(data, at)
        kind = "branch" if flags & _BRANCH else "leaf"
        found.setdefault(f"{name}-{kind}" if name in ("index", "blocks") else name, []).append(page)
        children = []
        for n in range((lower - _HEADER.size) // 2):
            node = at + struct.unpack_from("<H", data, at + _HEADER.size + 2 * n)[0]
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", data, node)
            value = node + 8 + key_bytes
            if kind == "branch":
                children.append(low | high << 16 | node_flags << 32)
            elif node_flags & _BIG:
                found.setdefault(f"{name}-value", []).append(struct.unpack_from("<Q", data, value)[0])
            elif node_flags & _SUB:
                roots[data[node + 8 : value].decode()] = _DATABASE.unpack_from(data, value)[-1]
        todo.extend(reversed(children))
    return roots
