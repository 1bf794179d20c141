"""The cold tier: compressed, checksummed blocks in LMDB on local disk. See docs/cold-store.md."""

from tierkv.storage.cold.tier import ColdTier, SegmentInfo, SyncLevel

__all__ = ["ColdTier", "SegmentInfo", "SyncLevel"]
