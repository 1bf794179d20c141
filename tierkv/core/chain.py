"""A tenant's chain against the index: what of it is published, where, and how much of it fits a tier."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from tierkv.core.prefix import hit_length, needed_blocks
from tierkv.core.state import State
from tierkv.core.tenants import Tenant
from tierkv.errors import InvalidRequest
from tierkv.storage.tier import NO_PARENT, BlockMeta, SlotTier

__all__ = ["Block", "ChainView"]

Block = tuple[int, int]  # (index in the chain, KV group)


class ChainView:
    """One chain of one tenant, for use with the engine's lock held. Keys are derived as far as they are asked for.

    Attributes
    ----------
    groups
        The KV groups that count.

    Raises
    ------
    NotFound
        The namespace is not registered.
    InvalidRequest
        It has no such KV group.
    """

    def __init__(
        self,
        state: State,
        tenant: Tenant,
        namespace: str,
        hashes: Sequence[bytes],
        groups: Sequence[int] | None = None,
    ) -> None:
        self._index = state.index
        self._tenant = tenant.id
        self._keys = state.keys.of(tenant, hashes)
        self.info = state.namespace(namespace)
        self.spec = self.info.spec
        self.groups = self._groups(groups)
        self._full = all(group.kind != "sliding_window" for group in self.spec.groups)

    def key(self, index: int, group: int) -> bytes:
        """Return the storage key of a block."""
        return self._keys.at(index, group)

    @property
    def gapless(self) -> bool:
        """Whether a prefix needs all of its blocks, so that the first one missing ends it."""
        return self._full

    def described(self, group: int, start: int, stop: int) -> list[tuple[bytes, BlockMeta]]:
        """Return keys of blocks, and what can be said of each without having it: all but its checksum, which is 0."""
        keys, info = self._keys.upto(group, stop), self.info
        size, namespace, tenant = info.sizes[group], info.fingerprint, self._tenant
        return [
            (keys[at], BlockMeta(size, 0, keys[at - 1] if at else NO_PARENT, namespace, tenant, at, group))
            for at in range(start, stop)
        ]

    def hit(self, total: int, mask: int = -1) -> int:
        """Longest usable prefix whose blocks lie in a level of `mask`."""
        if self._full:
            length = total
            for group in self.groups:
                length = self._run(group, length, mask)
            return length

        def has(index: int, at: int) -> bool:
            return bool(self._index.levels(self._keys.at(index, self.groups[at])) & mask)

        return hit_length([self.spec.groups[g] for g in self.groups], total, self.spec.block_tokens, has)

    def needed(self, length: int) -> list[Block]:
        """The blocks a prefix of `length` blocks needs, by index, then group."""
        if len(self.groups) == 1 and self._full:
            return [(index, self.groups[0]) for index in range(length)]
        ranges = [(g, needed_blocks(self.spec.groups[g], length, self.spec.block_tokens)) for g in self.groups]
        return [(index, g) for index in range(length) for g, needed in ranges if index in needed]

    def published(self, length: int) -> Iterator[tuple[Block, int]]:
        """Of the blocks a prefix needs, yield those that are published, and their levels as bits."""
        for block in self.needed(length):
            levels = self._index.levels(self._keys.at(*block))
            if levels:
                yield block, levels

    def shortened(self, length: int, blocks: int) -> int:
        """Longest prefix of less than `length` blocks that needs at most `blocks` in all groups together."""

        def needed(n: int) -> int:
            return sum(len(needed_blocks(group, n, self.spec.block_tokens)) for group in self.spec.groups)

        return bisect_right(range(length), blocks, key=needed) - 1

    def fitting(self, length: int, tier: SlotTier, share: float) -> int:
        """Longest prefix of at most `length` blocks that `share` of a memory tier can hold."""
        slots = [max(1, tier.slots_for(layout.nbytes)) for layout in self.info.layouts]

        def used(blocks: int) -> float:
            needed = (len(needed_blocks(group, blocks, self.spec.block_tokens)) for group in self.spec.groups)
            return sum(count / n for count, n in zip(needed, slots, strict=True))

        return bisect_right(range(length + 1), share + 1e-9, key=used) - 1

    def _groups(self, wanted: Sequence[int] | None) -> Sequence[int]:
        known = range(len(self.spec.groups))
        if wanted is None:
            return known
        if not wanted or not set(wanted) <= set(known):
            raise InvalidRequest(f"the namespace has {len(known)} KV groups", remedy="name at least one of them")
        return sorted(set(wanted))

    def _run(self, group: int, total: int, mask: int) -> int:
        """Published blocks of a group without a gap from the first; derives keys a portion ahead."""
        found = 0
        portion = 32
        while found < total:
            stop = min(total, found + portion)
            end = self._index.run(self._keys.upto(group, stop), found, stop, mask)
            if end < stop:
                return end
            found = stop
            portion *= 2
        return found
