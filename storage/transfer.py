"""Moving a block between two memory tiers."""

from __future__ import annotations

from tierkv.errors import NotFound
from tierkv.storage.tier import BlockMeta, Slot, SlotTier, verify

__all__ = ["copy_block"]


def copy_block(source: SlotTier, target: SlotTier, key: bytes, slot: Slot, meta: BlockMeta) -> None:
    """Fill a slot of `target` with a block that is pinned in `source`, verified where the CPU can address it. Blocks.

    Raises `NotFound` when `source` does not hold the block and `CorruptBlock` when its bytes are damaged.
    """
    held = source.slot(key)
    if held is None:
        raise NotFound(f"the block has left the {source.name} tier")
    if source.addressable:
        payload = source.view(held, meta.length)
        verify(payload, meta, source.name)
        target.write(slot, payload)
    else:
        arrived = target.view(slot, meta.length)
        source.read(held, arrived)
        verify(arrived, meta, source.name)
