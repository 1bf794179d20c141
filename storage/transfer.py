"""Moving a block between two memory tiers."""

from __future__ import annotations

from tierkv.errors import NotFound
from tierkv.storage.tier import BlockMeta, Slot, SlotTier, verify

__all__ = ["copy_block", "verified"]


def copy_block(source: SlotTier, target: SlotTier, key: bytes, slot: Slot, meta: BlockMeta) -> None:
    """Fill a slot of `target` with a block that is pinned in `source`, verified where the CPU can address it. Blocks.

    Raises `NotFound` when `source` does not hold the block and `CorruptBlock` when its bytes are damaged.
    """
    if source.addressable:
        target.write(slot, verified(source, key, meta))
        return
    arrived = target.view(slot, meta.length)
    source.read(_held(source, key), arrived)
    verify(arrived, meta, source.name)


def verified(source: SlotTier, key: bytes, meta: BlockMeta) -> memoryview:
    """Return the bytes, verified now, of a block pinned in a tier the CPU can address. Errors as `copy_block`."""
    payload = source.view(_held(source, key), meta.length)
    verify(payload, meta, source.name)
    return payload


def _held(source: SlotTier, key: bytes) -> Slot:
    held = source.slot(key)
    if held is None:
        raise NotFound(f"the block has left the {source.name} tier")
    return held
