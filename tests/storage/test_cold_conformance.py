"""The cold tier keeps the contract of every tier, with and without compression."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.conformance.quota_suite import QuotaConformance
from tests.conformance.tier_suite import TierConformance
from tierkv.storage.cold import ColdTier


class TestColdTier(TierConformance, QuotaConformance):
    capacity_bytes: ClassVar[int] = 8 << 20
    evicts: ClassVar[bool] = True
    codec: ClassVar[str] = "raw"

    def make_tier(self, directory: Path) -> ColdTier:
        return ColdTier(
            directory / "store",
            capacity_bytes=self.capacity_bytes,
            segment_bytes=2 << 20,
            codec=self.codec,
            sync="none",
        )


class TestColdTierCompressed(TestColdTier):
    codec: ClassVar[str] = "bx1"
