"""The engine: one cache for all tenants of a process, put together from its parts.

It is what the embedded cache and the daemon stand on. Operations that may wait are steps (see `tierkv.core.steps`); all
others return at once, except those that say that they block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any

from tierkv.core.computing import Computing
from tierkv.core.demotion import Demoter
from tierkv.core.events import Event
from tierkv.core.hints import Hints
from tierkv.core.index import Entry, Index
from tierkv.core.leases import ComputeRecord, Lease, PinRecord, WriteRecord
from tierkv.core.ledger import Ledger
from tierkv.core.loads import Loader
from tierkv.core.observing import Observer
from tierkv.core.placement import MemoryTier, Placement
from tierkv.core.prefetching import Prefetcher
from tierkv.core.rates import DeliveryRates
from tierkv.core.reading import Reader
from tierkv.core.removing import Remover
from tierkv.core.sessions import Session, SessionTable
from tierkv.core.sharing.knowledge import Knowledge
from tierkv.core.sharing.sharing import Sharing, SharingTerms
from tierkv.core.single import SingleBlocks
from tierkv.core.state import NamespaceInfo, State
from tierkv.core.tenants import Tenant, TenantRules, Tenants
from tierkv.core.trunks import Trunk, fold
from tierkv.core.uses import Uses
from tierkv.core.writing import Writer
from tierkv.errors import DeviceError, InvalidRequest, LimitExceeded, SpecMismatch, TierKVError, Unavailable
from tierkv.spec import KVSpec
from tierkv.storage.tier import Slot, SlotTier, SupportsQuotas, Tier, checksum

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore

__all__ = ["Engine", "Limits"]

log = logging.getLogger(__name__)

IDLE_WAKE_S = 1.0
QUARANTINE_S = 60.0
ROOM_WAIT_S = 1.0
SHARED_FLUSH_S = 30.0
SHARED_CLOSE_S = 5.0
SHARED_HALF_LIFE_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How many namespaces, tenants and sessions are known at once."""

    namespaces: int = 1024
    tenants: int = 1024
    sessions: int = 65536


class Engine:
    """Tiers, index, leases and the threads that move blocks.

    Parameters
    ----------
    memory, cold
        See `Placement`. The engine owns them and closes them.
    secret
        Server secret (16 to 64 bytes) all tenant keys are derived from.
    load_threads, load_bytes
        Threads that read, decode and copy promoted blocks, and the most bytes they are at, at once.
    rules
        What the operator granted each tenant, by name.
    most
        Bounds on what is remembered.
    shared, sharing
        The tier shared with other machines, if any, and how this one takes part. The engine owns it, too.
    """

    def __init__(
        self,
        memory: Sequence[MemoryTier],
        cold: Tier | None,
        secret: bytes,
        *,
        load_threads: int = 2,
        load_bytes: int = 256 << 20,
        rules: Mapping[str, TenantRules] | None = None,
        most: Limits | None = None,
        shared: SharedStore | None = None,
        sharing: SharingTerms | None = None,
    ) -> None:
        most = most or Limits()
        lock = Lock()
        tenants = Tenants(secret, rules or {}, most.tenants)
        ledger = Ledger(tenants)
        elsewhere = Knowledge(lambda: shared.available) if shared is not None else None
        index = Index(
            cold, len(memory) if cold is not None else -1, elsewhere, len(memory) + (1 if cold is not None else 0)
        )
        placement = Placement(memory, cold, index, ledger, tenants)
        state = self._state = State(placement, index, ledger, lock, tenants, SessionTable(most.sessions))
        state.delivery_rates = DeliveryRates({placement.shared_level: SHARED_HALF_LIFE_S})
        self._most = most
        self._shared = shared
        self._wakeup = Condition(lock)
        self._closing = False
        self._started = time.time()
        self._loader = Loader(
            state, self._need_room, threads=load_threads, bytes_in_flight=load_bytes, room_wait_s=ROOM_WAIT_S
        )
        state.leases.on_earlier = self._wakeup.notify
        self._demoter = Demoter(state)
        self._computing = Computing(state)
        self.prefetcher = Prefetcher(state, self._loader)
        self.reader = Reader(state, self._loader, self._computing)
        self.writer = Writer(state, self._computing, self._wakeup.notify, QUARANTINE_S)
        self.single = SingleBlocks(state, self._loader, self.writer, self.release)
        self.hints = Hints(state, self.prefetcher)
        self.uses = Uses(state)
        self._remover = Remover(state)
        if shared is not None and elsewhere is not None:
            state.sharing = Sharing(
                state, shared, elsewhere, sharing or SharingTerms(), self._remover.removed_elsewhere
            )
        self._caretaker = Thread(target=self._take_care, name="tierkv-caretaker", daemon=True)
        self._caretaker.start()

    @property
    def placement(self) -> Placement:
        """Tiers and their policies, for reading slots in place."""
        return self._state.placement

    def tenant(self, name: str) -> Tenant:
        """Return the tenant called `name`, deriving its key on first sight. Raises `LimitExceeded` for one too many."""
        with self._state.lock:
            return self._state.tenants.named(name)

    def register(self, spec: KVSpec) -> NamespaceInfo:
        """Make a namespace known.

        Raises `SpecMismatch` when its blocks can never fit a tier, and `LimitExceeded` for one namespace too many.
        """
        layouts = tuple(spec.layout(group) for group in range(len(spec.groups)))
        sizes = tuple(layout.nbytes for layout in layouts)
        info = NamespaceInfo(spec.namespace, spec.fingerprint, spec, layouts, sizes)
        largest = max(sizes)
        for tier in self._tiers():
            if largest > tier.largest_block:
                raise SpecMismatch(
                    f"blocks of {largest} bytes do not fit the {tier.name} tier, its limit is {tier.largest_block}",
                    remedy="use fewer tokens per block or a larger tier",
                )
        with self._state.lock:
            known = self._state.namespaces
            if info.name not in known and len(known) >= self._most.namespaces:
                raise LimitExceeded(
                    f"{self._most.namespaces} namespaces are registered already", remedy="raise limits.namespaces"
                )
            return known.setdefault(info.name, info)

    def namespace(self, name: str) -> NamespaceInfo:
        """Return a registered namespace or raise `NotFound`."""
        with self._state.lock:
            return self._state.namespace(name)

    def namespaces(self) -> list[NamespaceInfo]:
        with self._state.lock:
            return list(self._state.namespaces.values())

    def regrant(self, rules: Mapping[str, TenantRules], most: Limits, load_bytes: int) -> bool:
        """Go on with other rules and bounds. What exceeds them stays until it would have left anyway.

        A tenant that is known keeps its share scope; returns whether the rules ask for another one.
        """
        with self._state.lock:
            self._most = most
            self._state.sessions.most = most.sessions
            moved = self._state.tenants.regrant(rules, most.tenants)
            for memory in self.placement.memory:
                memory.order.regrant()
        self._loader.bound(load_bytes)
        return moved

    def release(self, tenant: Tenant, lease_id: str, corrupt: Sequence[tuple[int, int]] = ()) -> None:
        """End a read or compute lease; blocks (index, group) its holder found corrupt are verified again.

        Raises `LeaseLost`.
        """
        with self._state.lock:
            lease = self._state.leases.find(lease_id, tenant.id)
            if isinstance(lease, WriteRecord):
                raise InvalidRequest("this lease is for writing", remedy="abort it instead")
            if isinstance(lease, ComputeRecord):
                return self._computing.end(lease, "ended")
            self._state.leases.remove(lease)
            suspects = [e for e in lease.entries if (e.meta.depth, e.meta.group) in set(corrupt)] if corrupt else []
        try:
            for entry in suspects:
                self._reverify(entry)
        finally:
            with self._state.lock:
                self._end(lease, quarantine=False)

    def renew(self, tenant: Tenant, lease_id: str, ttl_s: float) -> None:
        """Move a lease's deadline; for a compute lease also what it may take until each further progress.

        Raises `LeaseLost`.
        """
        with self._state.lock:
            lease = self._state.leases.find(lease_id, tenant.id)
            self._state.leases.renew(lease, time.monotonic() + ttl_s)
            if isinstance(lease, ComputeRecord):
                lease.ttl_s = ttl_s
                if lease.claim is not None and self._state.sharing is not None:
                    lease.claim.ttl_s = ttl_s
                    self._state.sharing.progressed(lease.claim, lease.claim.key)
            self._wakeup.notify()

    def held_leases(self, tenant: Tenant) -> int:
        """How many live leases of all kinds a tenant has."""
        with self._state.lock:
            return self._state.leases.held(tenant.id)

    @property
    def cold_refusal(self) -> str:
        """Problem type of why the cold tier takes no blocks, such as ``storage-full``; empty when it does."""
        return self._demoter.refusal

    def delete(self, tenant: Tenant, namespace: str, chain_hash: bytes) -> int:
        """See `Remover.delete`."""
        return self._remover.delete(tenant, namespace, chain_hash)

    def clear(self, tenant: Tenant, namespace: str) -> int:
        """See `Remover.clear`."""
        return self._remover.clear(tenant, namespace)

    def flush(self) -> None:
        """Demote every dirty block, sync the cold tier, and write what was offered to other machines. Blocks."""
        self._flush(SHARED_FLUSH_S)

    def _flush(self, shared_s: float) -> None:
        self._demoter.drain()
        if self.placement.cold is not None:
            self.placement.cold.flush()
        if self._state.sharing is not None:
            self._state.sharing.flush(shared_s)

    def stats(self) -> dict[str, Any]:
        """Occupancy, leases and counters as plain data, see docs/metrics.md."""
        state = self._state
        with state.lock:
            report: dict[str, Any] = {
                "uptime_s": time.time() - self._started,
                "published_blocks": len(state.index),
                "namespaces": len(state.namespaces),
                "sessions": len(state.sessions),
                "leases": state.leases.counts(),
                "loads": self._loader.to_dict(),
                "quarantined_slots": len(state.quarantine),
                "dirty_bytes": {m.tier.name: m.dirty_bytes for m in self.placement.memory},
                "counters": state.counters.to_dict(),
                "tenants": state.tenants.to_dict(self._used_by_tenant()),
            }
        report["tiers"] = {tier.name: tier.describe() for tier in self._tiers()}
        if state.sharing is not None:
            report["shared"] = state.sharing.describe()
        return report

    def namespace_of(self, fingerprint: bytes) -> NamespaceInfo | None:
        """Return the namespace with this fingerprint; None for one that was not registered since the start."""
        with self._state.lock:
            return self._state.namespaces.get(fingerprint.hex())

    def trunks(self, most: int, tenant: Tenant | None = None) -> list[Trunk]:
        """Return the most used trunks of what is in memory, of one tenant or of all, see `tierkv.core.trunks`."""
        with self._state.lock:
            entries = self._state.index.all_awake()
        return fold((e for e in entries if tenant is None or e.meta.tenant == tenant.id), most)

    def tenant_of(self, tenant_id: bytes) -> Tenant | None:
        """Return the tenant with this id; None for one that was not seen since the start."""
        with self._state.lock:
            return self._state.tenants.of(tenant_id)

    def observe(self, observer: Observer) -> None:
        """Tell somebody of every request from now on."""
        with self._state.lock:
            self._state.observers += (observer,)

    def stop_observing(self, observer: Observer) -> None:
        """Tell somebody no more. Idempotent."""
        with self._state.lock:
            self._state.observers = tuple(known for known in self._state.observers if known is not observer)

    @property
    def shared_away(self) -> bool:
        """Whether there is a shared tier that does not answer."""
        return self._shared is not None and not self._shared.available

    @property
    def last_event(self) -> int:
        """Number of the latest event, 0 before the first."""
        return self._state.ledger.events.last

    def events_since(self, sequence: int, most: int) -> tuple[list[Event], int]:
        """Return at most so many events after `sequence`, and how many before them are not kept any more."""
        with self._state.lock:
            return self._state.ledger.events.since(sequence, most)

    def next_event(self, sequence: int) -> Future[None]:
        """Return a future that is done as soon as there is an event after `sequence`. Cancel it to stop waiting."""
        with self._state.lock:
            return self._state.ledger.events.after(sequence)

    def close(self) -> None:
        """End every lease, flush, and close the tiers. Blocks. Idempotent."""
        with self._state.lock:
            if self._closing:
                return
            self._closing = True
            self._wakeup.notify()
        self._caretaker.join()
        self._loader.close()
        with self._state.lock:
            for lease in self._state.leases.drain():
                self._end(lease, quarantine=False)
            self._state.room.signal()
        try:
            self._flush(SHARED_CLOSE_S)
        finally:
            if self._state.sharing is not None:
                self._state.sharing.close()
            for memory in self.placement.memory:
                memory.tier.close()
            if self.placement.cold is not None:
                self.placement.cold.close()

    def on_cold_evicted(self, keys: Sequence[bytes]) -> None:
        """Callback of the cold tier: it no longer holds these blocks."""
        level = self.placement.cold_level
        with self._state.lock:
            for key in keys:
                if key in self._state.index.condemned:
                    self._state.index.condemned.discard(key)
                    continue
                entry = self._state.index.awake(key)
                if entry is not None and entry.levels >> level & 1:
                    self._state.ledger.left_cold(key, entry)
                    self.placement.lost_level(entry, level, "evicted")
                elif entry is None and key not in self._state.index.purging:
                    self._state.ledger.left_cold(key, None)

    def _tiers(self) -> list[Tier]:
        cold = self.placement.cold
        return [*(memory.tier for memory in self.placement.memory), *([cold] if cold is not None else [])]

    def _used_by_tenant(self) -> dict[bytes, dict[str, int]]:
        """Bytes by tenant id and tier: slots in memory, payload in the cold tier."""
        used = self.placement.used_by_tenant()
        cold = self.placement.cold
        if cold is None or not isinstance(cold, SupportsQuotas):
            return used
        for tenant, nbytes in cold.payload_by_tenant().items():
            used.setdefault(tenant, {})[cold.name] = nbytes
        return used

    def _need_room(self) -> Future[None]:
        self._wakeup.notify()
        return self._state.room.next()

    def _take_care(self) -> None:
        """Expire leases, free quarantined slots, demote ahead of need, until closed."""
        state = self._state
        while True:
            with state.lock:
                if self._closing:
                    return
                self._expire(time.monotonic())
                back = self.hints.returning(time.monotonic())
                due = self._demoter.waiting()
                if not due and not back:
                    times = (state.leases.next_deadline(), self.hints.next_return(), time.monotonic() + IDLE_WAKE_S)
                    self._wakeup.wait(max(0.0, min(t for t in times if t is not None) - time.monotonic()))
                    continue
            for session in back:
                self._bring_back(session)
            if not due:
                continue
            try:
                moved = self._demoter.run()
            except Unavailable:
                return
            except Exception:
                log.exception("demotion failed unexpectedly")
                moved = False
            with state.lock:
                state.room.signal()
                if not moved and not self._closing:
                    self._wakeup.wait(IDLE_WAKE_S)

    def _expire(self, now: float) -> None:
        state = self._state
        for lease in state.leases.expired(now):
            state.ledger.expired(lease)
            self._end(lease, quarantine=True)
        self.prefetcher.expire(now)
        free = [item for item in state.quarantine if item[0] <= now]
        if free:
            state.quarantine = [item for item in state.quarantine if item[0] > now]
            for _, tier, slot in free:
                tier.discard(slot)
            state.room.signal()

    def _bring_back(self, session: Session) -> None:
        try:
            self.hints.prefetch(session)
        except TierKVError as error:  # a hint that came to nothing
            log.info("a paused session is not prefetched: %s", error)

    def _end(self, lease: Lease, *, quarantine: bool) -> None:
        state = self._state
        if isinstance(lease, WriteRecord):
            self.writer.end(lease, quarantine=quarantine)
        elif isinstance(lease, ComputeRecord):
            self._computing.end(lease, "expired")
            for writing in state.leases.writing(lease.keys):  # whoever takes over must be able to store
                state.leases.remove(writing)
                self.writer.end(writing, quarantine=True)
        elif isinstance(lease, PinRecord):
            self.hints.ended(lease)
        else:
            for entry in lease.entries:
                self.placement.unpin(entry)
            self._state.room.signal()

    def _reverify(self, entry: Entry) -> None:
        """Check a pinned block in every memory tier and remove the copies that are damaged. Blocks."""
        for level, memory in enumerate(self.placement.memory):
            slot = memory.tier.slot(entry.key)
            if slot is None or self._intact(memory.tier, slot, entry):
                continue
            with self._state.lock:
                if memory.tier.slot(entry.key) == slot:  # else another reader had it removed, and it was loaded anew
                    self.placement.damaged(entry, level, "checksum")

    @staticmethod
    def _intact(tier: SlotTier, slot: Slot, entry: Entry) -> bool:
        length = entry.meta.length
        if tier.addressable:
            return checksum(tier.view(slot, length)) == entry.meta.checksum
        copy = bytearray(length)
        try:
            tier.read(slot, memoryview(copy))
        except DeviceError:
            return False
        return checksum(copy) == entry.meta.checksum
