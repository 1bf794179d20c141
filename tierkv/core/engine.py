"""The engine: one cache for all tenants of a process, put together from its parts.

It is what the embedded cache and the daemon stand on. Operations that may wait are steps (see `tierkv.core.steps`); all
others return at once, except those that say that they block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from hashlib import blake2b
from threading import Condition, Lock, Thread
from typing import Any

from tierkv.core.counters import Counters
from tierkv.core.demotion import Demoter
from tierkv.core.index import Entry, Index
from tierkv.core.leases import ReadRecord, WriteRecord
from tierkv.core.loads import Loader
from tierkv.core.placement import MemoryLevel, Placement
from tierkv.core.reading import Reader
from tierkv.core.state import NamespaceInfo, State, Tenant
from tierkv.core.uses import Uses
from tierkv.core.writing import Writer
from tierkv.errors import InvalidRequest, SpecMismatch, Unavailable
from tierkv.keys import tenant_key
from tierkv.spec import KVSpec
from tierkv.storage.tier import Tier, checksum

__all__ = ["Engine"]

log = logging.getLogger(__name__)

IDLE_WAKE_S = 1.0
QUARANTINE_S = 60.0
ROOM_WAIT_S = 1.0


class Engine:
    """Tiers, index, leases and the threads that move blocks.

    Parameters
    ----------
    memory, cold
        See `Placement`. The engine owns them and closes them.
    secret
        Server secret (16 to 64 bytes) all tenant keys are derived from.
    load_threads
        Threads that read, decode and copy promoted blocks.
    """

    def __init__(
        self, memory: Sequence[MemoryLevel], cold: Tier | None, secret: bytes, *, load_threads: int = 2
    ) -> None:
        lock = Lock()
        counters, index = Counters(), Index()
        placement = Placement(memory, cold, index, counters)
        self._state = State(placement, index, counters, lock)
        self._secret = secret
        self._tenants: dict[str, Tenant] = {}
        self._wakeup = Condition(lock)
        self._closing = False
        self._started = time.time()
        self._loader = Loader(placement, counters, lock, self._need_room, threads=load_threads, room_wait_s=ROOM_WAIT_S)
        self._demoter = Demoter(self._state)
        self.reader = Reader(self._state, self._loader)
        self.uses = Uses(self._state)
        self.writer = Writer(self._state, self._wakeup.notify, QUARANTINE_S)
        if cold is not None:
            for key, meta in cold.records():
                entry = Entry(key, meta)
                placement.mark_cold(entry, meta.checksum)
                index.add(entry)
        self._caretaker = Thread(target=self._take_care, name="tierkv-caretaker", daemon=True)
        self._caretaker.start()

    @property
    def placement(self) -> Placement:
        """Tiers and their policies, for reading slots in place."""
        return self._state.placement

    def tenant(self, name: str) -> Tenant:
        """Return the tenant called `name`, deriving its key on first sight."""
        tenant = self._tenants.get(name)
        if tenant is None:
            key = tenant_key(self._secret, name)
            tenant = self._tenants[name] = Tenant(name, key, blake2b(b"id", digest_size=8, key=key).digest())
        return tenant

    def register(self, spec: KVSpec) -> NamespaceInfo:
        """Make a namespace known. Raises `SpecMismatch` when its blocks can never fit a tier."""
        layouts = tuple(spec.layout(group) for group in range(len(spec.groups)))
        info = NamespaceInfo(spec.namespace, spec.fingerprint, spec, layouts)
        largest = max(layout.nbytes for layout in layouts)
        for tier in self._tiers():
            if largest > tier.largest_block:
                raise SpecMismatch(
                    f"blocks of {largest} bytes do not fit the {tier.name} tier, its limit is {tier.largest_block}",
                    remedy="use fewer tokens per block or a larger tier",
                )
        with self._state.lock:
            return self._state.namespaces.setdefault(info.name, info)

    def namespace(self, name: str) -> NamespaceInfo:
        """Return a registered namespace or raise `NotFound`."""
        with self._state.lock:
            return self._state.namespace(name)

    def namespaces(self) -> list[NamespaceInfo]:
        with self._state.lock:
            return list(self._state.namespaces.values())

    def release(self, tenant: Tenant, lease_id: str, corrupt: Sequence[tuple[int, int]] = ()) -> None:
        """End a read lease, verifying again the blocks (index, group) its holder found corrupt. Raises `LeaseLost`."""
        with self._state.lock:
            lease = self._state.leases.find(lease_id, tenant.id)
            if isinstance(lease, WriteRecord):
                raise InvalidRequest("this lease is for writing", remedy="abort it instead")
            self._state.leases.remove(lease)
            suspects = [e for e in lease.entries if (e.meta.depth, e.meta.group) in set(corrupt)]
        try:
            for entry in suspects:
                self._reverify(entry)
        finally:
            with self._state.lock:
                self._unpin(lease)

    def renew(self, tenant: Tenant, lease_id: str, ttl_s: float) -> None:
        """Move a lease's deadline. Raises `LeaseLost`."""
        with self._state.lock:
            self._state.leases.renew(self._state.leases.find(lease_id, tenant.id), time.monotonic() + ttl_s)
            self._wakeup.notify()

    def delete(self, tenant: Tenant, namespace: str, chain_hash: bytes) -> int:
        """Unpublish one block in all groups and tiers; return how many were there. Blocks on the cold tier."""
        with self._state.lock:
            groups = range(len(self._state.namespace(namespace).layouts))
            found = [self._state.index.get(tenant.block_key(chain_hash, group)) for group in groups]
        return self._remove([entry for entry in found if entry is not None], "deleted")

    def clear(self, tenant: Tenant, namespace: str) -> int:
        """Unpublish a tenant's blocks of a namespace; return how many. Blocks on the cold tier."""
        with self._state.lock:
            fingerprint = self._state.namespace(namespace).fingerprint
            found = [e for e in self._state.index if e.meta.namespace == fingerprint and e.meta.tenant == tenant.id]
        return self._remove(found, "cleared")

    def flush(self) -> None:
        """Demote every dirty block and sync the cold tier. Blocks."""
        self._demoter.drain()
        if self.placement.cold is not None:
            self.placement.cold.flush()

    def stats(self) -> dict[str, Any]:
        """Occupancy, leases and counters as plain data, see docs/metrics.md."""
        state = self._state
        with state.lock:
            report: dict[str, Any] = {
                "uptime_s": time.time() - self._started,
                "published_blocks": len(state.index),
                "namespaces": len(state.namespaces),
                "leases": state.leases.counts(),
                "quarantined_slots": len(state.quarantine),
                "dirty_bytes": {m.tier.name: m.dirty_bytes for m in self.placement.memory},
                "counters": state.counters.to_dict(),
            }
        report["tiers"] = {tier.name: tier.describe() for tier in self._tiers()}
        return report

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
            self.flush()
        finally:
            for memory in self.placement.memory:
                memory.tier.close()
            if self.placement.cold is not None:
                self.placement.cold.close()

    def on_cold_evicted(self, keys: Sequence[bytes]) -> None:
        """Callback of the cold tier: it no longer holds these blocks."""
        level = self.placement.cold_level
        with self._state.lock:
            for key in keys:
                entry = self._state.index.get(key)
                if entry is not None and entry.levels >> level & 1:
                    self._state.counters.evicted_blocks["cold"] += 1
                    self.placement.lost_level(entry, level, "evicted")

    def _tiers(self) -> list[Tier]:
        cold = self.placement.cold
        return [*(memory.tier for memory in self.placement.memory), *([cold] if cold is not None else [])]

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
                due = self._demoter.waiting()
                if not due:
                    deadline = state.leases.next_deadline()
                    idle = IDLE_WAKE_S if deadline is None else min(IDLE_WAKE_S, max(0.0, deadline - time.monotonic()))
                    self._wakeup.wait(idle)
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
            state.counters.expired_leases["read" if isinstance(lease, ReadRecord) else "write"] += 1
            self._end(lease, quarantine=True)
        free = [item for item in state.quarantine if item[0] <= now]
        if free:
            state.quarantine = [item for item in state.quarantine if item[0] > now]
            for _, tier, slot in free:
                tier.discard(slot)
            state.room.signal()

    def _end(self, lease: ReadRecord | WriteRecord, *, quarantine: bool) -> None:
        if isinstance(lease, ReadRecord):
            self._unpin(lease)
        else:
            self.writer.end(lease, quarantine=quarantine)

    def _unpin(self, lease: ReadRecord) -> None:
        for entry in lease.entries:
            self.placement.unpin(entry)
        self._state.room.signal()

    def _reverify(self, entry: Entry) -> None:
        """Check a pinned block in every memory tier a reader can see and remove the copies that are damaged."""
        for level, memory in enumerate(self.placement.memory):
            if not memory.tier.addressable:
                continue
            slot = memory.tier.slot(entry.key)
            if slot is None or checksum(memory.tier.view(slot, entry.meta.length)) == entry.meta.checksum:
                continue
            with self._state.lock:
                if memory.tier.slot(entry.key) == slot:  # else another reader had it removed, and it was loaded anew
                    self.placement.damaged(entry, level, "checksum")

    def _remove(self, entries: Sequence[Entry], reason: str) -> int:
        with self._state.lock:
            live = [entry for entry in entries if entry.levels]
            in_cold = [entry.key for entry in live if self.placement.let_go(entry, reason)]
        cold = self.placement.cold
        if cold is not None and in_cold:
            try:
                for key in in_cold:
                    cold.delete(key)
            finally:
                with self._state.lock:
                    self.placement.purging.difference_update(in_cold)
        return len(live)
