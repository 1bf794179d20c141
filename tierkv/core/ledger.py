"""What happened, written down once: totals, totals per tenant, the log of events, and why blocks are gone.

All access happens under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.core.counters import Counters
from tierkv.core.events import EventKind, EventLog
from tierkv.core.index import Entry
from tierkv.core.leases import Lease
from tierkv.core.lost import LostBlocks
from tierkv.core.tenants import Tenant, Tenants

__all__ = ["Ledger"]


class Ledger:
    """Where the parts of the engine report to.

    Attributes
    ----------
    counters
        Totals since start.
    events
        The latest events.
    lost
        Why blocks are published no more.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.counters = Counters()
        self.events = EventLog()
        self.lost = LostBlocks()

    def stored(self, entries: Sequence[Entry], hashes: Sequence[bytes], tiers: Sequence[str]) -> None:
        """Blocks of one namespace were published: with their chain hashes, and the tiers they lie in."""
        meta = entries[0].meta
        nbytes = sum(entry.meta.length for entry in entries)
        self.counters.stored_blocks += len(entries)
        self.counters.stored_bytes += nbytes
        tenant = self._tenants.of(meta.tenant)
        if tenant is not None:
            tenant.counters.stored_bytes += nbytes
        self.arrived(entries, hashes, tiers)

    def arrived(self, entries: Sequence[Entry], hashes: Sequence[bytes], tiers: Sequence[str]) -> None:
        """Blocks of one namespace are on this machine that were not: stored here, or brought from another machine."""
        meta = entries[0].meta
        details = {
            "hashes": hashes,
            "parents": [entry.meta.parent for entry in entries],
            "depths": [entry.meta.depth for entry in entries],
            "groups": [entry.meta.group for entry in entries],
            "tiers": tiers,
        }
        self.events.record("stored", meta.tenant, meta.namespace, [entry.key for entry in entries], details)

    def promoted(self, entry: Entry, source: str, target: str, seconds: float) -> None:
        """A copy of a block arrived in a faster tier."""
        move = f"{source}>{target}"
        self.counters.promoted_blocks[move] += 1
        self.counters.promoted_bytes[move] += entry.meta.length
        self._about("promoted", entry, {"move": move, "parent": entry.meta.parent, "seconds": seconds})

    def demoted(self, entries: Sequence[Entry], source: str, target: str) -> None:
        """Copies of blocks arrived in a slower tier."""
        move = f"{source}>{target}"
        self.counters.demoted_blocks[move] += len(entries)
        self.counters.demoted_bytes[move] += sum(entry.meta.length for entry in entries)
        for entry in entries:
            self._about("demoted", entry, {"move": move, "parent": entry.meta.parent})

    def evicted(self, entry: Entry, tier: str, *, unused: bool, last: bool) -> None:
        """A memory tier gave a copy up to make room.

        `unused`: nobody had used it since it was promoted. `last`: there is no other, so `removed` says the rest.
        """
        self.counters.evicted_blocks[tier] += 1
        tenant = self._tenants.of(entry.meta.tenant)
        if tenant is not None:
            tenant.counters.evicted_blocks[tier] += 1
        if unused:
            self.counters.wasted_bytes += entry.meta.length
        if not last:
            self._about("evicted", entry, {"tier": tier})

    def removed(self, entry: Entry, reason: str) -> None:
        """A block is published no more."""
        self.counters.lost_blocks[reason] += 1
        self.lost.note(entry.key, reason)
        self._about("removed", entry, {"reason": reason})

    def left_cold(self, key: bytes, entry: Entry | None) -> None:
        """The cold tier gave a block up to make room; `entry` is None for one that was asleep, and so in no other tier.

        Of such a block nothing but the key is left: nobody can say any more whose it was.
        """
        self.counters.evicted_blocks["cold"] += 1
        if entry is not None:
            self._about("evicted", entry, {"tier": "cold"})
        else:
            self.counters.lost_blocks["evicted"] += 1
            self.lost.note(key, "evicted")
            self.events.add("removed", b"", b"", key, {"reason": "evicted"})

    def corrupt(self, entry: Entry, tier: str, cause: str) -> None:
        """A copy failed verification."""
        self.counters.corrupt_blocks[f"{tier}/{cause}"] += 1
        self._about("corrupt", entry, {"tier": tier, "cause": cause})

    def acquired(
        self,
        tenant: Tenant,
        namespace: bytes,
        requested: int,
        hits: Mapping[str, int],
        missed: Mapping[str, int],
        saved_s: float,
        waited_s: float,
    ) -> int:
        """A request was answered: tokens asked for, tokens served by tier, blocks missed by reason, and the seconds of
        prefill that it saved and of waiting that it cost. Returns the event's number."""
        self.counters.acquires += 1
        self.counters.saved_seconds += saved_s
        for counters in (self.counters, tenant.counters):
            counters.requested_tokens += requested
            counters.hit_tokens.update(hits)
        self.counters.missed_blocks.update(missed)
        details = {
            "requested_tokens": requested,
            "hit_tokens": hits,
            "missed_blocks": missed,
            "saved_s": saved_s,
            "waited_s": waited_s,
        }
        self.events.record("acquired", tenant.id, namespace, (), details)
        return self.events.last

    def read(self, tenant: Tenant, namespace: bytes, tokens: int, tier: str) -> None:
        """Tokens were read in place without asking, and reported afterwards."""
        for counters in (self.counters, tenant.counters):
            counters.requested_tokens += tokens
            counters.hit_tokens[tier] += tokens
        details = {
            "requested_tokens": tokens,
            "hit_tokens": {tier: tokens},
            "missed_blocks": {},
            "saved_s": 0.0,
            "waited_s": 0.0,
        }
        self.events.record("acquired", tenant.id, namespace, (), details)

    def expired(self, lease: Lease) -> None:
        """A lease ended by its deadline."""
        self.counters.expired_leases[lease.kind] += 1
        self.events.record("expired", lease.tenant, b"", (), {"lease": lease.kind})

    def _about(self, kind: EventKind, entry: Entry, details: Mapping[str, object]) -> None:
        self.events.add(kind, entry.meta.tenant, entry.meta.namespace, entry.key, details)
