"""How long torture takes, and where its findings go."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conformance.tier_suite import block, key_of, meta_of
from tierkv.errors import CorruptBlock, TierKVError
from tierkv.storage.cold import ColdTier

LONG = bool(os.environ.get("TIERKV_LONG"))
ROOT = Path(__file__).parents[2]


def say(line: str) -> None:
    """Tell the reader of a long run what was found (`make torture` shows it)."""
    if LONG:
        print(f"\n  {line}", flush=True)


def disk_use(path: Path) -> int:
    """Disk taken by a directory; what is deleted meanwhile takes none."""
    total = 0
    for entry in [path, *path.rglob("*")]:
        try:
            total += entry.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def put(tier: ColdTier, blocks: dict[int, bytes]) -> list[TierKVError]:
    """Store blocks under their numbers; return what was refused."""
    outcomes = tier.put_many([(key_of(number), data, meta_of(data)) for number, data in blocks.items()])
    return [error for error in outcomes if error is not None]


def holds(tier: ColdTier, number: int, data: bytes) -> bool:
    """Whether a block is there and verifies. Wrong bytes that pass for right ones are the end of the test."""
    meta = tier.meta(key_of(number))
    if meta is None:
        return False
    out = bytearray(meta.length)
    try:
        tier.read_into(key_of(number), memoryview(out))
    except CorruptBlock:
        return False
    if out != data:
        raise WrongBytes(f"block {number} was read as something else")
    return True


class WrongBytes(Exception):
    """The one thing that must never happen."""


__all__ = ["LONG", "ROOT", "WrongBytes", "block", "disk_use", "holds", "key_of", "meta_of", "put", "say"]
