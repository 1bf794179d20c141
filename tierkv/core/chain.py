"""A tenant's chain against the index: what of it is published, where, and how much of it fits a tier."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tierkv.core.index import Entry
from tierkv.core.prefix import hit_length, needed_blocks
from tierkv.core.state import State, Tenant
from tierkv.storage.tier import SlotTier

__all__ = ["Block", "ChainView"]

Block = tuple[int, int]  # (index in the chain, KV group)


class ChainView:
    """One chain of one tenant, for use with the engine's lock held. Keys are derived as far as they are asked for."""

    def __init__(self, state: State, tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> None:
        self._index = state.index
        self._tenant = tenant
        self._hashes = hashes
        self._keys: dict[Block, bytes] = {}
        info = state.namespace(namespace)
        self.spec = info.spec
        self._layouts = info.layouts

    def entry(self, index: int, group: int) -> Entry | None:
        key = self._keys.get((index, group))
        if key is None:
            key = self._keys[index, group] = self._tenant.block_key(self._hashes[index], group)
        return self._index.get(key)

    def hit(self, total: int, mask: int = -1) -> int:
        """Longest usable prefix whose blocks lie in a level of `mask`."""

        def has(index: int, group: int) -> bool:
            entry = self.entry(index, group)
            return entry is not None and bool(entry.levels & mask)

        return hit_length(self.spec.groups, total, self.spec.block_tokens, has)

    def needed(self, length: int) -> list[tuple[Block, Entry]]:
        """The published blocks a prefix of `length` blocks needs, by index, then group."""
        ranges = [needed_blocks(group, length, self.spec.block_tokens) for group in self.spec.groups]
        blocks = ((index, g) for index in range(length) for g, needed in enumerate(ranges) if index in needed)
        found = ((block, self.entry(*block)) for block in blocks)
        return [(block, entry) for block, entry in found if entry is not None]

    def shortened(self, length: int, blocks: int) -> int:
        """Longest prefix of less than `length` blocks that needs at most `blocks` in all groups together."""

        def needed(n: int) -> int:
            return sum(len(needed_blocks(group, n, self.spec.block_tokens)) for group in self.spec.groups)

        return bisect_right(range(length), blocks, key=needed) - 1

    def fitting(self, length: int, tier: SlotTier, share: float) -> int:
        """Longest prefix of at most `length` blocks that `share` of a memory tier can hold."""
        slots = [max(1, tier.slots_for(layout.nbytes)) for layout in self._layouts]

        def used(blocks: int) -> float:
            needed = (len(needed_blocks(group, blocks, self.spec.block_tokens)) for group in self.spec.groups)
            return sum(count / n for count, n in zip(needed, slots, strict=True))

        return bisect_right(range(length + 1), share + 1e-9, key=used) - 1
