"""Hints of callers about what comes next: pins, and sessions that pause or end."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.cache import Pinned
from tierkv.core.chain import ChainView
from tierkv.core.leases import LeaseTable, PinRecord
from tierkv.core.pinning import PinnedBytes, SavedPin
from tierkv.core.prefetching import Prefetcher
from tierkv.core.sessions import Session
from tierkv.core.state import State
from tierkv.core.tenants import Tenant
from tierkv.errors import LimitExceeded, NotFound

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


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A published prefix: its length, and the bytes of each block that it needs, by storage key."""

    blocks: int
    sizes: Mapping[bytes, int]


class Hints:
    """Keeps what callers asked to keep, and lets go of what they are done with."""

    def __init__(self, state: State, prefetcher: Prefetcher) -> None:
        self._state = state
        self._prefetcher = prefetcher
        self._pins: dict[object, PinRecord] = {}
        self._pinned = PinnedBytes()
        self._returns: list[_Return] = []
        self._number = 0

    def pin(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], ttl_s: float) -> Pinned:
        """See `tierkv.cache.Cache.pin`."""
        with self._state.lock:
            name = _name(tenant, namespace, hashes)
            pinned = self._pin(name, tenant, namespace, hashes, ttl_s, chain=(namespace, hashes))
        self._prefetcher.start(tenant, namespace, hashes[: pinned.blocks], ttl_s)
        return pinned

    def place(
        self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], points: Sequence[tuple[int, float]]
    ) -> list[tuple[Pinned, float]]:
        """Pin prefixes of a chain until nobody has hit them for a while: breakpoints.

        Parameters
        ----------
        points
            Of each, how many blocks it holds, and how many seconds after its last hit it ends. A breakpoint that is
            there already is placed anew; of two times for one prefix the longer counts.

        Returns
        -------
        list
            What each holds, the published part of its prefix, and its seconds; in the order of `points`. Does not wait.
            Raises `LimitExceeded` as `pin`, and changes nothing then.
        """
        wanted: dict[int, float] = {}
        for blocks, ttl_s in points:
            end = min(blocks, len(hashes))
            wanted[end] = max(ttl_s, wanted.get(end, 0.0))
        placed: dict[int, tuple[Pinned, float]] = {}
        with self._state.lock:
            prefixes = [self._prefix(tenant, namespace, hashes[:end]) for end in wanted]
            self._check(tenant, {key: size for prefix in prefixes for key, size in prefix.sizes.items()}, None)
            for (end, ttl_s), prefix in zip(wanted.items(), prefixes, strict=True):
                before = self._pins.get(_breakpoint_name(tenant, namespace, hashes[:end]))
                if before is not None and before.deadline > time.monotonic():
                    ttl_s = max(ttl_s, before.ttl_s)
                placed[end] = self._mark(tenant, namespace, hashes[:end], prefix, ttl_s), ttl_s
        longest = max(pinned.blocks for pinned, _ in placed.values())
        self._prefetcher.start(tenant, namespace, hashes[:longest], max(wanted.values()))
        return [placed[min(blocks, len(hashes))] for blocks, _ in points]

    def saved(self) -> list[SavedPin]:
        """Return the pins and breakpoints as they are now, the oldest first; not what holds sessions."""
        with self._state.lock:
            ahead = time.time() - time.monotonic()
            found = []
            for record in self._pins.values():
                tenant = self._state.tenants.of(record.tenant)
                if record.chain is not None and tenant is not None:
                    namespace, hashes = record.chain
                    ttl_s = record.ttl_s if record.mark is not None else 0.0
                    until = float(round(record.deadline + ahead))  # the same every time that it is asked
                    found.append(SavedPin(tenant.name, namespace, tuple(hashes), until, ttl_s))
            return found

    def restore(self, pins: Sequence[SavedPin]) -> int:
        """Place saved pins and breakpoints again, for the rest of their time, and load what they hold.

        Returns how many hold something: not those whose time is over, whose blocks are gone, that there is no room to
        pin for, or whose namespace is not registered. Does not wait.
        """
        restored = 0
        for pin in pins:
            left_s = min(pin.until - time.time(), pin.ttl_s or math.inf)  # clocks are set back
            if left_s <= 0:
                continue
            try:
                with self._state.lock:
                    tenant = self._state.tenants.named(pin.tenant)
                    prefix = self._prefix(tenant, pin.namespace, pin.hashes)
                    self._check(tenant, prefix.sizes, None)
                    if pin.ttl_s:
                        held = self._mark(tenant, pin.namespace, pin.hashes, prefix, pin.ttl_s, left_s)
                    else:
                        name = _name(tenant, pin.namespace, pin.hashes)
                        held = self._hold(name, tenant, prefix, left_s, chain=(pin.namespace, pin.hashes))
            except (LimitExceeded, NotFound):
                continue
            if held.blocks:
                restored += 1
                self._prefetcher.start(tenant, pin.namespace, pin.hashes[: held.blocks], left_s)
        return restored

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
        self._pinned.let_go(record.tenant, record.entries)
        self._state.breakpoints.remove(record)
        if self._pins.get(record.name) is record:
            del self._pins[record.name]
        for entry in record.entries:
            self._state.placement.unpin(entry)
        self._state.room.signal()

    def _pin(
        self,
        name: object,
        tenant: Tenant,
        namespace: str,
        hashes: Sequence[bytes],
        ttl_s: float,
        chain: tuple[str, Sequence[bytes]] | None = None,
    ) -> Pinned:
        prefix = self._prefix(tenant, namespace, hashes)
        self._check(tenant, prefix.sizes, self._pins.get(name))
        return self._hold(name, tenant, prefix, ttl_s, chain=chain)

    def _mark(
        self,
        tenant: Tenant,
        namespace: str,
        hashes: Sequence[bytes],
        prefix: _Prefix,
        ttl_s: float,
        left_s: float | None = None,
    ) -> Pinned:
        """Place a breakpoint that hits renew for `ttl_s`, and that ends in `left_s` if none comes."""
        mark = (namespace, hashes[-1]) if hashes else None
        name = _breakpoint_name(tenant, namespace, hashes)
        return self._hold(name, tenant, prefix, ttl_s, left_s, mark=mark, chain=(namespace, hashes))

    def _prefix(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> _Prefix:
        """Return what a pin of a chain would hold."""
        chain = ChainView(self._state, tenant, namespace, hashes)
        length = chain.fitting(chain.hit(len(hashes)), self._state.placement.memory[-1].tier, PIN_SHARE)
        needed = [block for block, _ in chain.published(length)]
        return _Prefix(length, {chain.key(*block): chain.info.sizes[block[1]] for block in needed})

    def _check(self, tenant: Tenant, sizes: Mapping[bytes, int], instead: PinRecord | None) -> None:
        """Raise `LimitExceeded` if a tenant may not pin these blocks, too."""
        most = int(PIN_SHARE * self._state.placement.memory[-1].order.allowance(tenant.id))
        wanted = self._pinned.with_instead(tenant.id, sizes, instead)
        if wanted > most:
            raise LimitExceeded(
                f"{wanted} bytes would be pinned, over the {most} bytes that may be",
                remedy="unpin something, pin less, or enlarge the warm tier",
            )

    def _hold(
        self,
        name: object,
        tenant: Tenant,
        prefix: _Prefix,
        ttl_s: float,
        left_s: float | None = None,
        *,
        mark: tuple[str, bytes] | None = None,
        chain: tuple[str, Sequence[bytes]] | None = None,
    ) -> Pinned:
        """Pin blocks, instead of those that the pin of this name holds, for `left_s` or else `ttl_s`.

        `mark` and `chain`: see `PinRecord`.
        """
        state = self._state
        self._unpin(name)
        entries = [entry for entry in map(state.index.wake, prefix.sizes) if entry is not None]
        for entry in entries:
            entry.pins += 1
        if not entries:
            return Pinned(0, 0)
        nbytes = sum(prefix.sizes.values())
        deadline = time.monotonic() + (ttl_s if left_s is None else left_s)
        record = PinRecord(LeaseTable.new_id(), tenant.id, deadline, entries, nbytes, name, ttl_s, mark, chain)
        self._pinned.hold(tenant.id, entries)
        state.breakpoints.add(record)
        self._pins[name] = record
        state.leases.add(record)
        return Pinned(prefix.blocks, nbytes)

    def _unpin(self, name: object) -> int:
        record = self._pins.get(name)
        if record is None:
            return 0
        self._state.leases.remove(record)
        self.ended(record)
        return len(record.entries)


def _breakpoint_name(tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> tuple[object, ...]:
    return "breakpoint", *_name(tenant, namespace, hashes)


def _name(tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> tuple[object, ...]:
    return tenant.id, namespace, hashes[-1] if hashes else b""
