"""Damage to one segment file, as disks, file systems and people do it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.torture.pages import PAGE, extent, pages_of

Harm = Callable[[Path, random.Random], None]


def flip_in(kind: str) -> Harm:
    """Change one to four bytes in a page of a kind."""

    def harm(path: Path, rng: random.Random) -> None:
        page = rng.choice(pages_of(path)[kind])
        used = 16 + 24 + 2 * 48 + 16 if kind == "meta" else PAGE
        with path.open("r+b") as file:
            for _ in range(rng.randint(1, 4)):
                at = page * PAGE + rng.randrange(used)
                file.seek(at)
                (old,) = file.read(1)
                file.seek(at)
                file.write(bytes([old ^ rng.randint(1, 255)]))

    return harm


def zero(kind: str) -> Harm:
    """A page that never reached the disk."""

    def harm(path: Path, rng: random.Random) -> None:
        _overwrite(path, rng.choice(pages_of(path)[kind]) * PAGE, bytes(PAGE))

    return harm


def scramble(kind: str) -> Harm:
    """A page with noise in it."""

    def harm(path: Path, rng: random.Random) -> None:
        _overwrite(path, rng.choice(pages_of(path)[kind]) * PAGE, rng.randbytes(PAGE))

    return harm


def swap(kind: str) -> Harm:
    """Two pages changed places, as after a misdirected write."""

    def harm(path: Path, rng: random.Random) -> None:
        pages = pages_of(path)[kind]
        one, other = rng.choice(pages), rng.choice(pages_of(path)["value"])
        data = path.read_bytes()
        first, second = (data[page * PAGE : (page + 1) * PAGE] for page in (one, other))
        _overwrite(path, one * PAGE, second)
        _overwrite(path, other * PAGE, first)

    return harm


def swap_values(path: Path, rng: random.Random) -> None:
    """The bytes of two blocks changed places."""
    data = path.read_bytes()
    one, other = (extent(data, page) for page in rng.sample(pages_of(path)["value"], 2))
    _overwrite(path, one[0], data[other[0] : other[1]][: one[1] - one[0]])
    _overwrite(path, other[0], data[one[0] : one[1]][: other[1] - other[0]])


def flip_in_value(path: Path, rng: random.Random) -> None:
    """One bit rotted somewhere in a block."""
    data = path.read_bytes()
    start, _ = extent(data, rng.choice(pages_of(path)["value"]))
    at = start + rng.randrange(2000)
    _overwrite(path, at, bytes([data[at] ^ 1 << rng.randrange(8)]))


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([0, 1, PAGE, rng.randrange(path.stat().st_size)]))


def replace_with_noise(path: Path, rng: random.Random) -> None:
    """Another file is put in its place, by rename."""
    other = path.with_name("other")
    other.write_bytes(rng.randbytes(rng.choice([0, 100, path.stat().st_size])))
    other.rename(path)


def overwrite_with_noise(path: Path, rng: random.Random) -> None:
    """Another file is copied over it, in place."""
    with path.open("r+b") as file:
        file.write(rng.randbytes(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def rename(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name(path.name + ".bak"))


def make_read_only(path: Path, rng: random.Random) -> None:
    path.chmod(0o400)


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


TREE_PAGES = ("meta", "main", "free", "header", "index-leaf", "index-branch", "blocks-leaf", "blocks-branch")

HARMS: Mapping[str, Harm] = {
    "bit in a value": flip_in_value,
    "values swapped": swap_values,
    "value page zeroed": zero("value"),
    "value page scrambled": scramble("value"),
    **{f"bytes in {kind}": flip_in(kind) for kind in TREE_PAGES},
    **{f"{kind} zeroed": zero(kind) for kind in TREE_PAGES},
    **{f"{kind} scrambled": scramble(kind) for kind in TREE_PAGES},
    **{f"{kind} misplaced": swap(kind) for kind in TREE_PAGES},
    "truncated": truncate,
    "replaced": replace_with_noise,
    "overwritten": overwrite_with_noise,
    "removed": remove,
    "renamed": rename,
    "read-only": make_read_only,
}
