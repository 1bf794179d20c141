"""Reading: lookup, prefetch and acquire."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierkv.cache import BlockRef, Hit, TicketProgress
from tierkv.core.chain import Block, ChainView
from tierkv.core.index import Entry
from tierkv.core.leases import LeaseTable, ReadRecord
from tierkv.core.loads import Load, Loader
from tierkv.core.state import State, Tenant
from tierkv.core.steps import Pause, Step
from tierkv.errors import InvalidRequest, NotFound

__all__ = ["Acquired", "Reader"]

TICKET_TTL_S = 300.0


@dataclass(frozen=True, slots=True)
class Acquired:
    """The result of an acquire, as `tierkv.cache.ReadLease` shows it.

    `id` is empty when nothing was pinned; `deadline` is the lease's, on the monotonic clock (seconds).
    """

    id: str
    deadline: float
    blocks: tuple[BlockRef, ...]
    hit_blocks: int
    hit_tokens: int
    published_blocks: int
    tokens_by_tier: Mapping[str, int]
    waited_s: float


@dataclass(slots=True, eq=False)
class _Ticket:
    tenant: bytes
    expires: float
    loads: list[Load]
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Wanted:
    """A pinned block of a running acquire: the level it was found at, and the load that brings it, if any."""

    entry: Entry
    level: int
    load: Load | None


class Reader:
    """Finds, promotes and pins published blocks."""

    def __init__(self, state: State, loader: Loader) -> None:
        self._state = state
        self._loader = loader
        self._tickets: dict[str, _Ticket] = {}

    def lookup(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> Hit:
        """See `tierkv.cache.Cache.lookup`."""
        state = self._state
        with state.lock:
            chain = ChainView(state, tenant, namespace, hashes)
            length = chain.hit(len(hashes))
            slowest = [0] * length
            for (index, _), entry in chain.needed(length):
                slowest[index] = max(slowest[index], entry.fastest())
            names = state.placement.names
        return Hit(length, length * chain.spec.block_tokens, tuple(names[level] for level in slowest))

    def prefetch(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes]) -> str:
        """Start promoting a prefix and return the ticket's id.

        No more of it is loaded than half the warm tier, and no more moved on than the hot tier holds, so that a
        prefetch never pushes out its own blocks.
        """
        state = self._state
        memory = state.placement.memory
        warm = len(memory) - 1
        now = time.monotonic()
        with state.lock:
            chain = ChainView(state, tenant, namespace, hashes)
            length = chain.fitting(chain.hit(len(hashes)), memory[warm].tier, 0.5)
            hot_length = chain.fitting(length, memory[0].tier, 1.0)
            needed = chain.needed(length)
            for _, entry in reversed(needed):  # what is near already must not make way for the rest
                state.placement.touch(entry, again=False)
            loads: list[Load] = []
            for (index, _), entry in needed:
                goal = 0 if index < hot_length else warm
                if entry.fastest() > goal:
                    level = 0 if entry.fastest() <= warm else warm
                    loads.append(self._loader.want(entry, level, onward=goal < level))
            self._drop_old_tickets(now)
            ticket_id = LeaseTable.new_id()
            self._tickets[ticket_id] = _Ticket(tenant.id, now + TICKET_TTL_S, loads)
        return ticket_id

    def progress(self, tenant: Tenant, ticket_id: str) -> TicketProgress:
        """See `tierkv.cache.Ticket.progress`. Raises `NotFound` for somebody else's ticket or one of long ago."""
        with self._state.lock:
            ticket = self._ticket(tenant, ticket_id)
            done = [load for load in ticket.loads if load.future.done()]
            return TicketProgress(
                "cancelled" if ticket.cancelled else "done" if len(done) == len(ticket.loads) else "loading",
                len(ticket.loads),
                len(done),
                sum(load.entry.meta.length for load in ticket.loads),
                sum(load.entry.meta.length for load in done),
            )

    def cancel(self, tenant: Tenant, ticket_id: str) -> None:
        """See `tierkv.cache.Ticket.cancel`."""
        with self._state.lock:
            ticket = self._ticket(tenant, ticket_id)
            if not ticket.cancelled:
                ticket.cancelled = True
                for load in ticket.loads:
                    self._loader.unwant(load)

    def acquire(
        self,
        tenant: Tenant,
        namespace: str,
        hashes: Sequence[bytes],
        *,
        wait_s: float,
        ttl_s: float,
        max_blocks: int | None,
        tiers: frozenset[str],
    ) -> Step[Acquired]:
        """See `tierkv.cache.Cache.acquire`. `tiers`: the memory tiers the caller can read in place."""
        state = self._state
        asked = time.monotonic()
        mask = sum(1 << level for level, memory in enumerate(state.placement.memory) if memory.tier.name in tiers)
        total = len(hashes) if max_blocks is None else max(0, min(len(hashes), max_blocks))
        wanted: dict[Block, _Wanted] = {}
        waited_s = 0.0
        failure = ""
        try:
            with state.lock:
                chain = ChainView(state, tenant, namespace, hashes)
                published = chain.hit(total)
                fitting = target = chain.fitting(published, state.placement.memory[-1].tier, 1.0)
                self._want(chain.needed(fitting), mask, wanted, load=wait_s > 0)
            while True:
                loads = [found.load.future for found in wanted.values() if found.load is not None]
                if loads:
                    yield Pause(loads, asked + wait_s)
                    waited_s = time.monotonic() - asked
                with state.lock:
                    index, reason = _first_failed(wanted)
                    if reason == "no_room" and not failure:
                        self._loader.try_again()
                    failure = failure or reason
                    if not reason or waited_s >= wait_s:
                        length = chain.hit(published, mask)
                        self._count(chain, wanted, total, published, fitting, length, failure, asked)
                        return self._pin(tenant, chain, wanted, length, published, mask, ttl_s, waited_s)
                    # Shorten the prefix: what remains may need window blocks that were not needed before, and without
                    # room for all of it the blocks further on must make way for those before them.
                    if reason == "no_room":
                        target = chain.shortened(target, sum(bool(w.entry.levels & mask) for w in wanted.values()))
                    else:
                        target = chain.hit(index)
                    needed = chain.needed(target)
                    self._unwant(wanted, keep={block for block, _ in needed if not _failed(wanted.get(block))})
                    self._want(needed, mask, wanted, load=True)
        finally:
            with state.lock:
                self._unwant(wanted)

    def refs(self, tenant: Tenant, lease_id: str) -> tuple[BlockRef, ...]:
        """Return the blocks a live read lease pins. Raises `LeaseLost`."""
        with self._state.lock:
            lease = self._state.leases.find(lease_id, tenant.id)
            if not isinstance(lease, ReadRecord):
                raise InvalidRequest("this lease is for writing", remedy="read blocks under the lease of an acquire")
            return lease.refs

    def _ticket(self, tenant: Tenant, ticket_id: str) -> _Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.tenant != tenant.id:
            raise NotFound("no such prefetch ticket", remedy="tickets are kept for five minutes")
        return ticket

    def _drop_old_tickets(self, now: float) -> None:
        while self._tickets:
            oldest, ticket = next(iter(self._tickets.items()))
            if ticket.expires > now:
                return
            del self._tickets[oldest]

    def _want(
        self, needed: Sequence[tuple[Block, Entry]], mask: int, wanted: dict[Block, _Wanted], *, load: bool
    ) -> None:
        """Pin published blocks and start loading those that are not in memory."""
        warm = len(self._state.placement.memory) - 1
        for block, entry in needed:
            if block in wanted:
                continue
            entry.pins += 1
            level = entry.arrival.level if entry.arrival else entry.fastest()
            missing = load and not entry.levels & mask
            wanted[block] = _Wanted(entry, level, self._loader.want(entry, warm) if missing else None)

    def _unwant(self, wanted: dict[Block, _Wanted], keep: Collection[Block] = ()) -> None:
        """Undo `_want`."""
        for block in [block for block in wanted if block not in keep]:
            found = wanted.pop(block)
            self._state.placement.unpin(found.entry)
            if found.load is not None:
                self._loader.unwant(found.load)
        self._state.room.signal()

    def _pin(
        self,
        tenant: Tenant,
        chain: ChainView,
        wanted: Mapping[Block, _Wanted],
        length: int,
        published: int,
        mask: int,
        ttl_s: float,
        waited_s: float,
    ) -> Acquired:
        """Turn the resident prefix into a lease (with the lock held)."""
        state = self._state
        needed = chain.needed(length)
        refs: list[BlockRef] = []
        slowest = [0] * length
        for (index, group), entry in needed:
            level = (entry.levels & mask & -(entry.levels & mask)).bit_length() - 1
            tier = state.placement.memory[level].tier
            slot = tier.slot(entry.key)
            assert slot is not None
            entry.pins += 1
            refs.append(BlockRef(index, group, tier.name, slot.offset, entry.meta.length, entry.meta.checksum))
            found = wanted.get((index, group))
            slowest[index] = max(slowest[index], found.level if found else entry.fastest())
        for block, entry in reversed(needed):
            found = wanted.get(block)
            fresh = entry.arrival is not None or (found is not None and found.load is not None)
            state.placement.touch(entry, again=not fresh)
            entry.arrival = None
        state.placement.touch_cold([entry.key for _, entry in reversed(needed)])
        by_tier = Counter(state.placement.names[level] for level in slowest)
        tokens_by_tier = {name: count * chain.spec.block_tokens for name, count in by_tier.items()}
        state.counters.hit_tokens.update(tokens_by_tier)
        lease_id, deadline = "", time.monotonic() + ttl_s
        if needed:
            lease_id = LeaseTable.new_id()
            state.leases.add(ReadRecord(lease_id, tenant.id, deadline, [entry for _, entry in needed], tuple(refs)))
        tokens = length * chain.spec.block_tokens
        return Acquired(lease_id, deadline, tuple(refs), length, tokens, published, tokens_by_tier, waited_s)

    def _count(
        self,
        chain: ChainView,
        wanted: Mapping[Block, _Wanted],
        total: int,
        published: int,
        fitting: int,
        length: int,
        failure: str,
        asked: float,
    ) -> None:
        """Count misses by reason, and how much of the load time was over before this request asked."""
        counters = self._state.counters
        counters.acquires += 1
        counters.requested_tokens += total * chain.spec.block_tokens
        for reason, blocks in (
            ("absent", total - published),
            ("no_room", published - max(fitting, length)),
            (failure or "late", max(fitting, length) - length),
        ):
            if blocks:
                counters.missed_blocks[reason] += blocks
        for (index, _), found in wanted.items():
            if index >= length:
                continue
            if found.load is not None and found.load.ended:
                started, ended = found.load.started, found.load.ended
            elif found.entry.arrival is not None:
                started, ended = found.entry.arrival.started, found.entry.arrival.ended
            else:
                continue
            hidden = max(0.0, min(ended, asked) - started)
            counters.load_seconds += ended - started
            counters.hidden_seconds += hidden
            counters.exposed_seconds += ended - started - hidden


def _first_failed(wanted: Mapping[Block, _Wanted]) -> tuple[int, str]:
    """Return index of the foremost block whose load has failed, and why; an empty reason if none has."""
    for (index, _), found in sorted(wanted.items(), key=lambda item: item[0]):
        if found.load is not None and _failed(found):
            return index, found.load.failure
    return 0, ""


def _failed(found: _Wanted | None) -> bool:
    return bool(found and found.load and found.load.future.done() and not found.load.future.result())
