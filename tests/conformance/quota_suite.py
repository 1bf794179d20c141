"""The conformance suite of `SupportsQuotas`, for tiers that pass `TierConformance` too."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.tier_suite import block, key_of, meta_of, read
from tierkv.errors import InvalidRequest, Unavailable
from tierkv.storage.tier import SupportsQuotas, Tier

__all__ = ["QuotaConformance", "put_for", "recount"]

ANN, BOB = b"tenant-a", b"tenant-b"


def put_for(tier: Tier, tenant: bytes, *numbers: int, length: int = 5000, **fields: object) -> None:
    """Store blocks of a tenant."""
    for number in numbers:
        payload = block(number, length)
        tier.put(key_of(number), payload, meta_of(payload, tenant=tenant, **fields))


def recount(tier: Tier) -> dict[bytes, int]:
    """Add up each tenant's payload from the records."""
    sums: Counter[bytes] = Counter()
    for _, meta in tier.records():
        sums[meta.tenant] += meta.length
    return dict(+sums)


class QuotaConformance:
    """Inherit beside `TierConformance`, whose fixture `tier` this uses; the tier must have room for 16 small blocks."""

    @pytest.fixture
    def quotas(self, tier: Tier) -> SupportsQuotas:
        assert isinstance(tier, SupportsQuotas)
        return tier

    def test_counts_payload_by_tenant(self, tier: Tier, quotas: SupportsQuotas) -> None:
        assert quotas.payload_by_tenant() == {}
        put_for(tier, ANN, 1, 2)
        put_for(tier, BOB, 3, length=70_001)
        put_for(tier, ANN, 1, 3)
        put_for(tier, ANN, 4, length=0)
        assert quotas.payload_by_tenant() == recount(tier) == {ANN: 10_000, BOB: 70_001}
        tier.delete(key_of(3))
        tier.delete(key_of(1))
        assert quotas.payload_by_tenant() == recount(tier) == {ANN: 5000}

    def test_a_tenant_is_counted_over_all_its_namespaces_and_groups(self, tier: Tier, quotas: SupportsQuotas) -> None:
        for number in range(6):
            put_for(tier, ANN, number, namespace=key_of(number % 3), group=number % 2)
        assert quotas.payload_by_tenant() == {ANN: 30_000}
        assert quotas.trim(ANN, 15_000) == 3
        assert quotas.payload_by_tenant() == recount(tier) == {ANN: 15_000}

    def test_trim_evicts_the_oldest_of_one_tenant(self, tier: Tier, quotas: SupportsQuotas) -> None:
        for number in range(12):
            put_for(tier, BOB if number % 3 == 0 else ANN, number)
        assert quotas.trim(ANN, 15_001) == 5
        assert [number for number in range(12) if tier.has(key_of(number))] == [0, 3, 6, 8, 9, 10, 11]
        assert all(read(tier, key_of(number)) == block(number, 5000) for number in (0, 3, 6, 8, 9, 10, 11))
        assert quotas.payload_by_tenant() == {ANN: 15_000, BOB: 20_000}

    def test_trim_stops_at_what_it_was_given(self, tier: Tier, quotas: SupportsQuotas) -> None:
        put_for(tier, ANN, 1, 2, 3)
        assert quotas.trim(ANN, 15_000) == quotas.trim(ANN, 10**9) == quotas.trim(BOB, 0) == 0
        assert quotas.trim(ANN, 14_999) == 1
        assert quotas.trim(ANN, 0) == 2
        assert (quotas.payload_by_tenant(), tier.usage().blocks) == ({}, 0)

    def test_a_trimmed_block_can_be_put_again(self, tier: Tier, quotas: SupportsQuotas) -> None:
        put_for(tier, ANN, 1)
        quotas.trim(ANN, 0)
        assert read(tier, key_of(1)) is None
        put_for(tier, BOB, 1, length=6000)
        assert read(tier, key_of(1)) == block(1, 6000)
        assert quotas.payload_by_tenant() == {BOB: 6000}

    def test_less_than_nothing_is_refused(self, quotas: SupportsQuotas) -> None:
        with pytest.raises(InvalidRequest):
            quotas.trim(ANN, -1)

    def test_a_closed_tier_says_so_for_quotas_too(self, tier: Tier, quotas: SupportsQuotas) -> None:
        put_for(tier, ANN, 1)
        tier.close()
        with pytest.raises(Unavailable):
            quotas.payload_by_tenant()
        with pytest.raises(Unavailable):
            quotas.trim(ANN, 0)
