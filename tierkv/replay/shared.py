"""The tier that nodes have in common: one LRU of blocks, and what is written to it."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from tierkv.errors import ConfigError

__all__ = ["SharedBlocks", "SharedPlan", "parse_write"]

_HITS = re.compile(r"hits:([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The shared tier.

    Attributes
    ----------
    capacity
        Blocks it holds; None: all.
    write
        ``all``: what a node computed. ``demotion``: what a node writes to its cold tier; without one, what leaves its
        memory. ``hits``: what was part of a node's hits for the `hits`-th time since it came into its memory.
    """

    capacity: int | None = None
    write: Literal["all", "demotion", "hits"] = "all"
    hits: int = 1


def parse_write(text: str) -> tuple[Literal["all", "demotion", "hits"], int]:
    """Read `all`, `demotion` or `hits:3`. Raises `ConfigError`."""
    if text == "all":
        return "all", 1
    if text == "demotion":
        return "demotion", 1
    match = _HITS.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} does not say what to write", remedy="use all, demotion or hits:N, such as hits:2")
    return "hits", int(match[1])


class SharedBlocks:
    """What lies in the shared tier.

    Only loads and stores renew a block: the engine sees nothing of hits in a node's own tiers, and is not told.

    Attributes
    ----------
    held
        The blocks, the next to be evicted first.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise ConfigError(f"a shared tier of {capacity} blocks", remedy="use 0 or more")
        self.held: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def load(self, block: int) -> None:
        """Renew a block that is there."""
        self.held.move_to_end(block)

    def store(self, block: int) -> bool:
        """Take a block in, and say whether it was new; one that is there already is not written, nor renewed."""
        if block in self.held or self._capacity == 0:
            return False
        self.held[block] = None
        if self._capacity is not None and len(self.held) > self._capacity:
            self.held.popitem(last=False)
        return True
