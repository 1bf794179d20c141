"""Who loses blocks when a memory tier is full: first the tenants that hold more than their share.

Each tenant's blocks have an eviction order of their own. A tenant's share of the tier is in proportion to its weight
among the tenants that use the tier; whoever is furthest over its share loses the first block of its own order. So a
tenant within its share never loses a block to another's scan, and the whole tier is anybody's who is alone. A tenant
that has asked for nothing for a while has no share: its blocks stay until others need the room.
All access happens under the engine's lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from tierkv.core.index import Entry
from tierkv.core.tenants import TenantRules
from tierkv.policy import EvictionPolicy

__all__ = ["FairOrder"]

IDLE_S = 600.0


class _Share:
    """One tenant's part of a tier: its blocks in eviction order, the bytes of its slots, and when it last asked."""

    __slots__ = ("policy", "quota", "seen", "target", "used", "weight")

    def __init__(self, policy: EvictionPolicy[bytes], weight: float, quota: float) -> None:
        self.policy = policy
        self.weight = weight
        self.quota = quota
        self.used = 0
        self.target = 0.0
        self.seen = 0.0


class FairOrder:
    """The eviction order of one memory tier.

    Parameters
    ----------
    tier
        Name of the tier, for quotas.
    capacity
        Bytes of the tier.
    make
        Makes an eviction policy for so many bytes.
    rules
        Looks up the rules of a tenant id.
    """

    def __init__(
        self,
        tier: str,
        capacity: int,
        make: Callable[[int], EvictionPolicy[bytes]],
        rules: Callable[[bytes], TenantRules],
    ) -> None:
        self._tier = tier
        self._capacity = capacity
        self._make = make
        self._rules = rules
        self._shares: dict[bytes, _Share] = {}
        self._active: dict[bytes, _Share] = {}
        self._divided = 0.0

    def regrant(self) -> None:
        """Look up the rules of all tenants again. Nobody loses a block before somebody needs the room."""
        for tenant, share in self._shares.items():
            rules = self._rules(tenant)
            share.weight, share.quota = rules.weight, rules.quotas.get(self._tier, math.inf)
            share.target = 0.0
        self._divide()

    def seen(self, tenant: bytes) -> None:
        """Note that a tenant asks for blocks."""
        share = self._share(tenant)
        before, share.seen = share.seen, time.monotonic()
        if share.used and share.seen - before > IDLE_S:
            self._divide()

    def take(self, tenant: bytes, nbytes: int) -> None:
        """Count a slot to a tenant, from its allocation on."""
        share = self._share(tenant)
        share.seen = time.monotonic()
        if not share.used:
            self._active[tenant] = share
            share.used = nbytes
            self._divide()
        else:
            share.used += nbytes

    def give(self, tenant: bytes, nbytes: int) -> None:
        """Count a slot out."""
        share = self._shares[tenant]
        share.used -= nbytes
        if not share.used:
            del self._active[tenant]
            self._divide()

    def used(self) -> dict[bytes, int]:
        """Return the bytes of each tenant's slots."""
        return {tenant: share.used for tenant, share in self._active.items()}

    def allowance(self, tenant: bytes) -> int:
        """Return the bytes a tenant can count on now: its share, or its quota if that is less."""
        share = self._share(tenant)
        alone = share.target or self._capacity * share.weight / (self._weight() + share.weight)
        return int(min(alone, share.quota))

    def within_quota(self, tenant: bytes, nbytes: int) -> bool:
        """Say whether a tenant's quota allows it so many bytes more."""
        share = self._share(tenant)
        return share.used + nbytes <= share.quota

    def insert(self, entry: Entry) -> None:
        """Give a settled block its place in the order."""
        self._share(entry.meta.tenant).policy.insert(entry.key, entry.meta.length)

    def touch(self, entry: Entry) -> None:
        """See `EvictionPolicy.touch`."""
        self._shares[entry.meta.tenant].policy.touch(entry.key)

    def refresh(self, entry: Entry) -> None:
        """See `EvictionPolicy.refresh`."""
        self._shares[entry.meta.tenant].policy.refresh(entry.key)

    def retire(self, entry: Entry) -> None:
        """See `EvictionPolicy.retire`."""
        self._shares[entry.meta.tenant].policy.retire(entry.key)

    def evict(self, entry: Entry) -> None:
        """See `EvictionPolicy.evict`."""
        self._shares[entry.meta.tenant].policy.evict(entry.key)

    def remove(self, entry: Entry) -> None:
        """See `EvictionPolicy.remove`."""
        self._shares[entry.meta.tenant].policy.remove(entry.key)

    def losers(self, tenant: bytes) -> list[bytes]:
        """Return the tenants that may lose blocks so that `tenant` gets room, the first to lose first.

        Those over their share, and `tenant` itself. Where nobody is over (room is lost between slots of several
        sizes, too), whoever uses most of its share.
        """
        active = self._active
        if len(active) == 1:
            return list(active)
        if time.monotonic() - self._divided > IDLE_S / 10:
            self._divide()

        def fullness(name: bytes) -> float:
            share = active[name]
            return share.used / share.target if share.target else math.inf

        # Of two that are equally full the one that asks.
        by_use = sorted(active, key=lambda name: (fullness(name), name == tenant), reverse=True)
        over = [t for t in by_use if active[t].used > active[t].target]
        if not over:
            return by_use[: by_use.index(tenant) + 1] if tenant in active else by_use
        if tenant not in over and tenant in active:
            over.append(tenant)
        return over

    def victims(self, tenant: bytes) -> Iterator[bytes]:
        """Yield the keys of a tenant's blocks in eviction order."""
        return self._share(tenant).policy.victims()

    def _share(self, tenant: bytes) -> _Share:
        share = self._shares.get(tenant)
        if share is None:
            rules = self._rules(tenant)
            quota = rules.quotas.get(self._tier, math.inf)
            share = _Share(self._make(int(min(self._capacity, quota))), rules.weight, quota)
            self._shares[tenant] = share
        return share

    def _weight(self) -> float:
        return sum(share.weight for share in self._active.values())

    def _divide(self) -> None:
        """Divide the tier anew: somebody came, left, or fell silent."""
        self._divided = time.monotonic()
        silent = self._divided - IDLE_S
        total = sum(share.weight for share in self._active.values() if share.seen >= silent)
        for share in self._shares.values():
            target = self._capacity * share.weight / total if share.used and share.seen >= silent else 0.0
            if target != share.target:
                share.target = target
                if target:
                    share.policy.resize(int(min(target, share.quota)))
