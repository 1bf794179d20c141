"""Hints of callers about what comes next: pins, and sessions that pause or end."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.cache import Pinned
from tierkv.core.chain import ChainView
from tierkv.core.index import Entry
from tierkv.core.leases import LeaseTable, PinRecord
from tierkv.core.prefetching import Prefetcher
from tierkv.core.sessions import Session
from tierkv.core.state import State
from tierkv.core.tenants import Tenant
from tierkv.errors import LimitExceeded

__all__ = ["Hints"]

PIN_SHARE = 0.5
"""Part of what a tenant can count on in the warm tier that it may pin."""
HOLD_S = 60.0
"""Longest expected pause that blocks are held in memory for: after a tool call most sessions are back by then."""
HOLD_FACTOR = 1.5
PREFETCH_LEAD_S = 5.0


@dataclass(order=True, frozen=True, slots=True)
class _Return:
    at: float
    number: int
    session: Session


class Hints:
    """Keeps what callers asked to keep, and lets go of what they are done with."""

    def __init__(self, state: State, prefetcher: Prefetcher) -> None:
        self._state = state
        self._prefetcher = prefetcher
        self._pins: dict[object, PinRecord] = {}
        self._pinned_bytes: dict[bytes, int] = {}
        self._returns: list[_Return] = []
        self._number = 0

    def pin(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], ttl_s: float) -> Pinned:
        """See `tierkv.cache.Cache.pin`."""
        with self._state.lock:
            pinned = self._pin(_name(tenant, namespace, hashes), tenant, namespace, hashes, ttl_s)
        self._prefetcher.start(tenant, namespace, hashes[: pinned.blocks], ttl_s)
        return pinned

    def unpin(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> int:
        """See `tierkv.cache.Cache.unpin`."""
        with self._state.lock:
            return self._unpin(_name(tenant, namespace, hashes))

    def end_session(self, tenant: Tenant, namespace: str, name: str) -> int:
        """See `tierkv.cache.Cache.end_session`."""
        state = self._state
        state.sessions.check(name)
        with state.lock:
            session = state.sessions.find(tenant.id, namespace, name)
            if session is None:
                return 0
            state.sessions.end(session)
            self._unpin(session)
            chain = ChainView(state, tenant, namespace, session.hashes)
            retired = 0
            for index in range(len(session.hashes)):  # the tail last: it shall leave first
                for group in chain.groups:
                    entry = state.index.awake(chain.key(index, group))
                    if entry is not None and entry.owner is session:
                        entry.owner = None
                        state.placement.retire(entry)
                        retired += 1
        return retired

    def pause_session(self, tenant: Tenant, namespace: str, name: str, expected_s: float) -> int:
        """See `tierkv.cache.Cache.pause_session`."""
        state = self._state
        state.sessions.check(name)
        now = time.monotonic()
        with state.lock:
            session = state.sessions.find(tenant.id, namespace, name)
            if session is None:
                return 0
            session.resumes = now + expected_s
            if expected_s > HOLD_S:
                self._number += 1
                at = session.resumes - PREFETCH_LEAD_S
                heapq.heappush(self._returns, _Return(at, self._number, session))
                return 0
            try:
                return self._pin(session, tenant, namespace, session.hashes, HOLD_FACTOR * expected_s).blocks
            except LimitExceeded:  # it is only a hint
                return 0

    def next_return(self) -> float | None:
        """When `returning` has something to do next (monotonic seconds; with the lock held)."""
        return self._returns[0].at if self._returns else None

    def returning(self, now: float) -> list[Session]:
        """Take the sessions whose pause is about to end (with the lock held)."""
        due = []
        while self._returns and self._returns[0].at <= now:
            session = heapq.heappop(self._returns).session
            known = self._state.sessions.find(session.tenant, session.namespace, session.name)
            if known is session and session.resumes:
                session.resumes = 0.0
                due.append(session)
        return due

    def prefetch(self, session: Session) -> None:
        """Bring a session's blocks back to memory."""
        tenant = self._state.tenants.of(session.tenant)
        if tenant is not None:
            self._prefetcher.start(tenant, session.namespace, session.hashes, 2 * PREFETCH_LEAD_S)

    def ended(self, record: PinRecord) -> None:
        """Let go of the blocks of a pin that is no lease any more (with the lock held)."""
        self._pinned_bytes[record.tenant] -= record.nbytes
        if not self._pinned_bytes[record.tenant]:
            del self._pinned_bytes[record.tenant]
        if self._pins.get(record.name) is record:
            del self._pins[record.name]
        for entry in record.entries:
            self._state.placement.unpin(entry)
        self._state.room.signal()

    def _pin(self, name: object, tenant: Tenant, namespace: str, hashes: Sequence[bytes], ttl_s: float) -> Pinned:
        state = self._state
        warm = state.placement.memory[-1]
        chain = ChainView(state, tenant, namespace, hashes)
        length = chain.fitting(chain.hit(len(hashes)), warm.tier, PIN_SHARE)
        needed = list(chain.published(length))
        nbytes = sum(chain.info.sizes[group] for (_, group), _ in needed)
        most = int(PIN_SHARE * warm.order.allowance(tenant.id))
        before = self._pins.get(name)
        if self._pinned_bytes.get(tenant.id, 0) - (before.nbytes if before else 0) + nbytes > most:
            raise LimitExceeded(
                f"pinning {nbytes} bytes more would be over the {most} bytes that may be pinned",
                remedy="unpin something, pin less, or enlarge the warm tier",
            )
        self._unpin(name)
        entries: list[Entry] = []
        for block, _ in needed:
            entry = state.index.wake(chain.key(*block))
            if entry is not None:
                entry.pins += 1
                entries.append(entry)
        if not entries:
            return Pinned(0, 0)
        record = PinRecord(LeaseTable.new_id(), tenant.id, time.monotonic() + ttl_s, entries, nbytes, name)
        self._pinned_bytes[tenant.id] = self._pinned_bytes.get(tenant.id, 0) + nbytes
        self._pins[name] = record
        state.leases.add(record)
        return Pinned(length, nbytes)

    def _unpin(self, name: object) -> int:
        record = self._pins.get(name)
        if record is None:
            return 0
        self._state.leases.remove(record)
        self.ended(record)
        return len(record.entries)


def _name(tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> object:
    return tenant.id, namespace, hashes[-1] if hashes else b""
