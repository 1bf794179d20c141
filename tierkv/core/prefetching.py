"""Prefetching: promoting a prefix before somebody asks for it, and the tickets that say how far it is."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tierkv.cache import TicketProgress
from tierkv.core.chain import ChainView
from tierkv.core.leases import LeaseTable
from tierkv.core.load import Load
from tierkv.core.loads import Loader
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step
from tierkv.core.tenants import Tenant
from tierkv.errors import NotFound

__all__ = ["Prefetcher"]

TICKET_TTL_S = 300.0
MOST_TICKETS = 16384


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A load of a KV group's block, and whether the block is to go on from where it brings it."""

    group: int
    load: Load
    onward: bool


@dataclass(slots=True, eq=False)
class _Ticket:
    """`loads` by layers: KV group first, then index. `stale`: when what has not begun by then is given up. `asking`:
    the shared tier has not said yet what more there is."""

    tenant: bytes
    stale: float
    loads: list[_Wanted] = field(default_factory=list)
    asking: Future[None] | None = None
    over: bool = False
    cancelled: bool = False


class Prefetcher:
    """Starts promotions that nobody waits for yet."""

    def __init__(self, state: State, loader: Loader) -> None:
        self._state = state
        self._loader = loader
        self._tickets: dict[str, _Ticket] = {}
        self._due: list[tuple[float, str]] = []

    def start(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], deadline_s: float) -> str:
        """See `tierkv.cache.Cache.prefetch`; returns the ticket's id.

        No more of the prefix is loaded than half the warm tier, and no more moved on than the hot tier holds, so that a
        prefetch never pushes out its own blocks.
        """
        state = self._state
        now = time.monotonic()
        probe: Future[bool] | None = None
        with state.lock:
            self.expire(now)
            if len(self._tickets) >= MOST_TICKETS:
                self._stop(self._tickets.pop(next(iter(self._tickets))))
            chain = ChainView(state, tenant, namespace, hashes)
            ticket_id = LeaseTable.new_id()
            ticket = self._tickets[ticket_id] = _Ticket(tenant.id, now + deadline_s)
            heapq.heappush(self._due, (ticket.stale, ticket_id))
            self._load(ticket, chain, len(hashes))
            if state.sharing is not None and (here := chain.hit(len(hashes))) < len(hashes):
                state.sharing.seen(tenant.id, chain.info.fingerprint)
                probe = state.sharing.ask(chain, here, len(hashes))
                ticket.asking = Future() if probe is not None else None
        if probe is not None:
            probe.add_done_callback(lambda _: self._go_on(ticket, chain, len(hashes)))
        return ticket_id

    def _go_on(self, ticket: _Ticket, chain: ChainView, total: int) -> None:
        """Load what the shared tier has, too, now that it has said so."""
        with self._state.lock:
            asking, ticket.asking = ticket.asking, None
            if not ticket.over:
                self._load(ticket, chain, total)
        if asking is not None:
            asking.set_result(None)

    def _load(self, ticket: _Ticket, chain: ChainView, total: int) -> None:
        """Start loading what is published of a chain, as far as this ticket does not want it already."""
        state, memory = self._state, self._state.placement.memory
        warm = len(memory) - 1
        length = chain.fitting(chain.hit(total), memory[warm].tier, 0.5)
        hot_length = chain.fitting(length, memory[0].tier, 1.0)
        needed = list(chain.published(length))
        for block, _ in reversed(needed):  # what is near already must not make way for the rest
            entry = state.index.awake(chain.key(*block))
            if entry is not None:
                state.placement.touch(entry, again=False)
        wanted = {found.load.key for found in ticket.loads}
        for (index, group), levels in sorted(needed, key=lambda item: (item[0][1], item[0][0])):
            fastest = (levels & -levels).bit_length() - 1
            goal = 0 if index < hot_length else warm
            key = chain.key(index, group)
            if fastest > goal and key not in wanted:
                level = 0 if fastest <= warm else warm
                nbytes, onward = chain.info.sizes[group], goal < level
                load = self._loader.want(key, nbytes, level, ticket.stale, onward=onward)
                ticket.loads.append(_Wanted(group, load, onward))

    def progress(self, tenant: Tenant, ticket_id: str) -> TicketProgress:
        """See `tierkv.cache.Ticket.progress`. Raises `NotFound` for somebody else's ticket or one of long ago."""
        with self._state.lock:
            return self._progress(self._find(tenant, ticket_id))

    def wait(self, tenant: Tenant, ticket_id: str, groups: int | None, wait_s: float) -> Step[TicketProgress]:
        """See `tierkv.cache.Ticket.wait`. Errors as `progress`."""
        deadline = time.monotonic() + wait_s
        with self._state.lock:
            ticket = self._find(tenant, ticket_id)
        while True:
            with self._state.lock:
                wanted = [w for w in ticket.loads if groups is None or w.group < groups]
                pending: list[Future[Any]] = [last.future for w in wanted if not (last := w.load.last()).future.done()]
                pending += [ticket.asking] if ticket.asking is not None else []
                if not pending or time.monotonic() >= deadline:
                    return self._progress(ticket)
            yield Pause(pending, deadline)

    def cancel(self, tenant: Tenant, ticket_id: str) -> None:
        """See `tierkv.cache.Ticket.cancel`."""
        with self._state.lock:
            ticket = self._find(tenant, ticket_id)
            ticket.cancelled |= not ticket.over
            self._stop(ticket)

    def expire(self, now: float) -> None:
        """Give up loads that have not begun by their deadline, and forget old tickets (with the lock held)."""
        while self._due and self._due[0][0] <= now:
            at, ticket_id = heapq.heappop(self._due)
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                continue
            if at > ticket.stale:
                del self._tickets[ticket_id]
            else:
                self._stop(ticket)
                heapq.heappush(self._due, (ticket.stale + TICKET_TTL_S, ticket_id))

    def _stop(self, ticket: _Ticket) -> None:
        if not ticket.over:
            ticket.over = True
            for wanted in ticket.loads:
                self._loader.unwant(wanted.load, onward=wanted.onward)

    @staticmethod
    def _progress(ticket: _Ticket) -> TicketProgress:
        done = [wanted.load for wanted in ticket.loads if wanted.load.last().future.done()]
        complete = len(done) == len(ticket.loads) and ticket.asking is None
        return TicketProgress(
            "cancelled" if ticket.cancelled else "done" if complete else "loading",
            len(ticket.loads),
            len(done),
            sum(wanted.load.nbytes for wanted in ticket.loads),
            sum(load.nbytes for load in done),
        )

    def _find(self, tenant: Tenant, ticket_id: str) -> _Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.tenant != tenant.id:
            raise NotFound("no such prefetch ticket", remedy="tickets are kept for five minutes")
        return ticket
