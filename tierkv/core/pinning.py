"""What pins hold, breakpoints (pins that every hit of their prefix renews), and what of both outlives a restart.

All under the engine's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierkv.core.index import Entry
from tierkv.core.leases import LeaseTable, PinRecord

__all__ = ["Breakpoints", "PinnedBytes", "SavedPin"]


@dataclass(frozen=True, slots=True)
class SavedPin:
    """A pin or breakpoint, as it is placed again after a restart.

    Attributes
    ----------
    tenant, namespace
        Names of whose it is.
    hashes
        Chain hashes of the prefix, from the first block.
    until
        When it ends, in seconds since the epoch.
    ttl_s
        Of a breakpoint: seconds that a hit renews it for; 0 for a pin that nothing renews.
    """

    tenant: str
    namespace: str
    hashes: tuple[bytes, ...]
    until: float
    ttl_s: float


class PinnedBytes:
    """Bytes that pins hold, by tenant. A block that several pins hold counts once."""

    def __init__(self) -> None:
        self._holds: dict[bytes, Counter[bytes]] = {}
        self._nbytes: Counter[bytes] = Counter()

    def with_instead(self, tenant: bytes, sizes: Mapping[bytes, int], instead: PinRecord | None) -> int:
        """Return what a tenant would have pinned with these blocks (bytes by key), and without the pin `instead`."""
        held = self._holds.get(tenant, Counter())
        ending = {entry.key: entry.meta.length for entry in instead.entries} if instead is not None else {}
        ended = sum(length for key, length in ending.items() if held[key] == 1)
        added = sum(length for key, length in sizes.items() if held[key] == (key in ending))
        return self._nbytes[tenant] - ended + added

    def hold(self, tenant: bytes, entries: Sequence[Entry]) -> None:
        """Count the blocks of a pin that begins."""
        held = self._holds.setdefault(tenant, Counter())
        for entry in entries:
            held[entry.key] += 1
            if held[entry.key] == 1:
                self._nbytes[tenant] += entry.meta.length

    def let_go(self, tenant: bytes, entries: Sequence[Entry]) -> None:
        """Count out the blocks of a pin that has ended."""
        held = self._holds[tenant]
        for entry in entries:
            held[entry.key] -= 1
            if not held[entry.key]:
                del held[entry.key]
                self._nbytes[tenant] -= entry.meta.length
        if not held:
            del self._holds[tenant], self._nbytes[tenant]


class Breakpoints:
    """The breakpoints of all tenants, by the block that each ends with."""

    def __init__(self) -> None:
        self._marked: dict[tuple[bytes, str], dict[bytes, PinRecord]] = {}

    def add(self, record: PinRecord) -> None:
        """Note a pin that ends with `PinRecord.mark`."""
        if record.mark is not None:
            namespace, chain_hash = record.mark
            self._marked.setdefault((record.tenant, namespace), {})[chain_hash] = record

    def remove(self, record: PinRecord) -> None:
        """Forget a pin that has ended."""
        if record.mark is None:
            return
        namespace, chain_hash = record.mark
        marked = self._marked[record.tenant, namespace]
        if marked.get(chain_hash) is record:
            del marked[chain_hash]
        if not marked:
            del self._marked[record.tenant, namespace]

    def hit(self, leases: LeaseTable, tenant: bytes, namespace: str, hashes: Iterable[bytes], now: float) -> None:
        """Renew the breakpoints on blocks that a tenant has just been given, named by their chain hashes."""
        marked = self._marked.get((tenant, namespace))
        if marked:
            for record in [marked[chain_hash] for chain_hash in hashes if chain_hash in marked]:
                leases.renew(record, now + record.ttl_s)
