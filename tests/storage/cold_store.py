"""Blocks, stores and looks at them for the tests of the cold tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.conformance.tier_suite import block, key_of, meta_of, read
from tierkv.storage.cold import ColdTier

KIB, MIB = 1 << 10, 1 << 20
SIZE = 60 * KIB

OpenCold = Callable[..., ColdTier]


def opener(path: Path) -> Iterator[OpenCold]:
    """Yield a function that opens the store at `path`; everything opened is closed at the end."""
    opened: list[ColdTier] = []

    def make(**changes: Any) -> ColdTier:
        defaults: dict[str, Any] = {
            "capacity_bytes": 10 * MIB,
            "segment_bytes": 2 * MIB,
            "codec": "raw",
            "sync": "none",
        }
        opened.append(ColdTier(path, **(defaults | changes)))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def disk_use(path: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def put(tier: ColdTier, *numbers: int, size: int = SIZE) -> None:
    items = []
    for number in numbers:
        payload = block(number, size)
        items.append((key_of(number), payload, meta_of(payload)))
    assert tier.put_many(items) == [None] * len(numbers)


def present(tier: ColdTier, numbers: range | list[int], size: int = SIZE) -> list[int]:
    """Which of these blocks are there; each must read back as it was put."""
    found = [number for number in numbers if tier.meta(key_of(number)) is not None]
    for number in found:
        assert read(tier, key_of(number)) == block(number, size)
    return found


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("segment-*.lmdb"))


def fill_segments(open_cold: OpenCold, path: Path, blocks: int = 90) -> dict[str, int]:
    """Make a store of several segments and close it; return how many blocks each file holds."""
    with closing(open_cold()) as tier:
        for number in range(blocks):
            put(tier, number)
        held = {segment.name: segment.blocks for segment in tier.segments()}
    assert sum(held.values()) == blocks
    assert len(held) >= 3
    return held
