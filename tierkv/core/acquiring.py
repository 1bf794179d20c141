"""One acquire, from the question to the lease: what to load, what to wait for, what to pin.

All methods run with the engine's lock held. `begin` and `look` say what to wait for next, or None when the answer is
there. The order of things: load the part of the published prefix that pays; wait for those loads as long as that pays;
then, where a neighbour computes what is missing, wait for it; then pin what is in memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from tierkv.cache import BlockRef, LoadChoice
from tierkv.core.chain import Block, ChainView
from tierkv.core.computing import Computing
from tierkv.core.index import Entry
from tierkv.core.leases import ComputeRecord, LeaseTable, ReadRecord
from tierkv.core.loads import Load, Loader
from tierkv.core.payoff import Patience, decide
from tierkv.core.state import State
from tierkv.core.steps import Pause
from tierkv.core.tenants import Tenant

__all__ = ["Acquired", "Acquisition", "ComputeGrant", "Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller of acquire asks for; the parameters of `tierkv.cache.Cache.acquire`.

    Attributes
    ----------
    tiers
        The memory tiers the caller can read in place.
    """

    tiers: frozenset[str]
    wait_s: float
    ttl_s: float
    max_blocks: int | None = None
    compute_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    session: str = ""
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ComputeGrant:
    """A compute lease on blocks ``[start, stop)``; `deadline` of the first progress in monotonic seconds."""

    id: str
    start: int
    stop: int
    deadline: float


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
    missed_tokens: Mapping[str, int]
    saved_s: float
    waited_s: float
    choice: LoadChoice
    compute: ComputeGrant | None
    computed_elsewhere: bool


@dataclass(slots=True, eq=False)
class _Wanted:
    """A pinned block of a running acquire: the level it was found at, and the load that brings it, if any."""

    entry: Entry
    level: int
    load: Load | None

    def failed(self) -> bool:
        return self.load is not None and self.load.future.done() and not self.load.future.result()


class Acquisition:
    """A running acquire.

    Attributes
    ----------
    holding
        It pins blocks, wants loads or waits for a neighbour, which `let_go` gives up.
    """

    def __init__(self, state: State, loader: Loader, computing: Computing, tenant: Tenant, terms: Terms) -> None:
        self._state = state
        self._loader = loader
        self._computing = computing
        self._tenant = tenant
        self._terms = terms
        self._asked = time.monotonic()
        self._deadline = self._asked + terms.wait_s
        memory = state.placement.memory
        self._mask = sum(1 << level for level, m in enumerate(memory) if m.tier.name in terms.tiers)
        self._wanted: dict[Block, _Wanted] = {}
        self._failure = ""
        self._paused = False
        self._patience: Patience | None = None
        self._until = float("inf")
        self._deviation_s = 0.0
        self._shared_from: int | None = None
        self._neighbour: tuple[ComputeRecord, Future[None]] | None = None
        self._result: Acquired | None = None

    @property
    def holding(self) -> bool:
        return bool(self._wanted) or self._neighbour is not None

    def result(self) -> Acquired:
        """The answer, once `begin` or `look` has returned None."""
        assert self._result is not None
        return self._result

    def begin(self, namespace: str, hashes: Sequence[bytes]) -> Pause | None:
        """Start loading what pays. Raises `NotFound` for an unknown namespace."""
        terms = self._terms
        self._state.sessions.check(terms.session)
        self._hashes = hashes
        self._chain = ChainView(self._state, self._tenant, namespace, hashes, terms.groups)
        self._total = len(hashes) if terms.max_blocks is None else max(0, min(len(hashes), terms.max_blocks))
        for memory in self._state.placement.memory:
            memory.order.seen(self._tenant.id)
        self._start_loads()
        return self._next()

    def look(self) -> Pause | None:
        """Go on after a pause."""
        self._paused = True
        self._leave_neighbour()
        return self._next()

    def let_go(self) -> None:
        """Give up pins, loads and waiting."""
        self._unwant()
        self._leave_neighbour()

    def _start_loads(self) -> None:
        """Find the published prefix and start loading as far as it pays."""
        chain = self._chain
        self._published = chain.hit(self._total)
        self._fitting = self._fit(self._published)
        ready = chain.hit(self._fitting, self._mask)
        if ready == self._fitting or self._terms.wait_s <= 0:
            reason = "in_memory" if self._fitting else "miss"
            self._choice = LoadChoice(reason if ready == self._fitting else "no_wait", self._fitting, 0.0, 0.0)
            self._target = self._planned = self._fitting
            return
        costs = self._costs(self._fitting)
        block_s = self._block_s()
        decision = decide(costs, block_s)
        self._choice = LoadChoice(decision.reason, decision.load_blocks, decision.load_s, decision.recompute_s)
        self._state.counters.decisions[decision.reason] += 1
        self._target = self._planned = decision.load_blocks
        if block_s is not None and self._target > ready:
            self._patience = Patience(len(self._hashes) * block_s, block_s)
            verdict = self._patience.reconsider(0.0, costs[: self._target], self._deviation_s)
            self._until = self._asked + verdict.until_s
        self._want(chain.needed(self._target), load=True)

    def _next(self) -> Pause | None:
        """Wait for what is worth waiting for, or pin."""
        while True:
            now = time.monotonic()
            pending = [w.load.future for w in self._wanted.values() if w.load is not None and not w.load.future.done()]
            if now < self._deadline:
                foremost = None if pending else self._foremost_failed()
                if foremost is not None:
                    self._shorten(foremost)
                    continue
                if pending and self._worth_waiting(now):
                    return Pause(pending, min(self._deadline, self._until))
            if self._grew():
                continue
            pause = self._share(now)
            if pause is None:
                self._pin(now)
            return pause

    def _worth_waiting(self, now: float) -> bool:
        """Ask patience, if there is a prefill rate to compare with."""
        if self._patience is None or now < self._until:
            return True
        costs = self._costs(self._target)
        verdict = self._patience.reconsider(now - self._asked, costs, self._deviation_s)
        if not verdict.stay:
            self._choice = replace(self._choice, reason="too_slow")
            return False
        if verdict.load_blocks < self._target:
            self._target = self._planned = verdict.load_blocks
            self._unwant(keep=set(self._chain.needed(self._target)))
        self._until = self._asked + verdict.until_s
        return True

    def _foremost_failed(self) -> Block | None:
        """Return the first block whose load has failed."""
        return min((block for block, wanted in self._wanted.items() if wanted.failed()), default=None)

    def _shorten(self, foremost: Block) -> None:
        """Go on with a shorter prefix, because of a load that failed.

        What remains may need window blocks that were not needed before, and without room for all of it the blocks
        further on must make way for those before them.
        """
        chain = self._chain
        load = self._wanted[foremost].load
        assert load is not None
        if load.failure == "no_room" and not self._failure:
            self._loader.try_again()
        self._failure = self._failure or load.failure
        if load.failure == "no_room":
            here = sum(bool(w.entry.levels & self._mask) for w in self._wanted.values())
            self._target = chain.shortened(self._target, here)
        else:
            self._target = chain.hit(foremost[0])
        needed = chain.needed(self._target)
        self._unwant(keep={block for block in needed if block in self._wanted and not self._wanted[block].failed()})
        self._want(needed, load=True)

    def _grew(self) -> bool:
        """Take in what was published while this request waited for somebody who computes."""
        if self._shared_from is None or self._target < self._fitting:
            return False
        published = self._chain.hit(self._total)
        if published <= self._published:
            return False
        self._published = published
        self._fitting = self._target = self._planned = self._fit(published)
        self._want(self._chain.needed(self._target), load=time.monotonic() < self._deadline)
        return True

    def _share(self, now: float) -> Pause | None:
        """Find out who computes what is missing: a neighbour, whom it pays to wait for, or this caller."""
        self._grant: ComputeGrant | None = None
        terms, chain, computing = self._terms, self._chain, self._computing
        owner = computing.at(chain, self._published) if self._published < self._total else None
        self._elsewhere = owner is not None
        if not terms.compute_s or self._published >= self._total:
            return None
        if owner is None:
            lease = computing.claim(self._tenant, chain, self._published, self._total, terms.compute_s)
            self._grant = ComputeGrant(lease.id, lease.start, lease.stop, lease.deadline)
            return None
        if now >= self._deadline or self._target < self._published:
            return None
        if self._shared_from is None:
            self._shared_from = self._published
        self._neighbour = (owner, computing.wait(owner, chain, self._published, self._total))
        return Pause([self._neighbour[1]], self._deadline)

    def _leave_neighbour(self) -> None:
        if self._neighbour is not None:
            self._computing.forget(*self._neighbour)
            self._neighbour = None

    def _pin(self, now: float) -> None:
        """Turn the resident prefix into a lease."""
        state, chain, terms, wanted = self._state, self._chain, self._terms, self._wanted
        placement = state.placement
        length = chain.hit(self._published, self._mask)
        waited_s = now - self._asked if self._paused else 0.0
        missed = self._missed(length)
        tiers = [memory.tier for memory in placement.memory]
        refs: list[BlockRef] = []
        entries: list[Entry] = []
        slowest = [0] * length
        for index, group in chain.needed(length):
            entry = state.index.awake(chain.key(index, group))
            assert entry is not None
            readable = entry.levels & self._mask
            tier = tiers[(readable & -readable).bit_length() - 1]
            slot = tier.slot(entry.key)
            assert slot is not None
            meta = entry.meta
            refs.append(BlockRef(index, group, tier.name, slot.offset, meta.length, meta.checksum))
            entries.append(entry)
            entry.pins += 1
            entry.uses += 1
            entry.used = now
            found = wanted.get((index, group))
            level = found.level if found else entry.arrival.level if entry.arrival else entry.fastest()
            if found is not None and found.load is not None and found.load.ended:
                self._count_load(found.load.started, found.load.ended)
            elif entry.arrival is not None:
                self._count_load(entry.arrival.started, entry.arrival.ended)
            if level > slowest[index]:
                slowest[index] = level
        session = None
        if terms.session:
            hashes = self._hashes if isinstance(self._hashes, tuple) else tuple(self._hashes)
            session = state.sessions.use(self._tenant.id, chain.info.name, terms.session, hashes)
        state.sessions.own(session, entries)
        fresh = {id(w.entry) for w in wanted.values() if w.load is not None}
        for entry in reversed(entries):
            placement.touch(entry, again=entry.arrival is None and id(entry) not in fresh)
            entry.arrival = None
        placement.touch_cold([entry.key for entry in reversed(entries)])
        by_tier = Counter(placement.names[level] for level in slowest)
        tokens_by_tier = {name: count * chain.spec.block_tokens for name, count in by_tier.items()}
        block_tokens, tokens = chain.spec.block_tokens, length * chain.spec.block_tokens
        requested = self._total * block_tokens
        saved_s = max(0.0, length * (self._block_s() or 0.0) - waited_s)
        state.ledger.acquired(
            self._tenant, chain.info.fingerprint, requested, tokens_by_tier, missed, saved_s, waited_s
        )
        lease_id, deadline = "", now + terms.ttl_s
        if entries:
            lease_id = LeaseTable.new_id()
            state.leases.add(ReadRecord(lease_id, self._tenant.id, deadline, entries, tuple(refs)))
        self._result = Acquired(
            lease_id,
            deadline,
            tuple(refs),
            length,
            tokens,
            self._published,
            tokens_by_tier,
            {reason: blocks * block_tokens for reason, blocks in missed.items()},
            saved_s,
            waited_s,
            self._choice,
            self._grant,
            self._elsewhere,
        )

    def _missed(self, length: int) -> dict[str, int]:
        """Blocks that were asked for and are not part of a prefix of `length`, by reason."""
        if self._shared_from is not None:
            shared = max(0, length - self._shared_from) * self._chain.spec.block_tokens
            self._state.counters.shared_tokens += shared
        missed: Counter[str] = Counter()
        if self._published < self._total:
            missed[self._lost()] += self._total - self._published
        loaded = max(self._planned, length)
        late = "cheaper_computed" if self._choice.reason == "too_slow" else self._failure or "late"
        missed["no_room"] += self._published - max(self._fitting, length)
        missed["cheaper_computed"] += max(self._fitting, length) - loaded
        missed[late] += loaded - length
        return {reason: blocks for reason, blocks in missed.items() if blocks}

    def _lost(self) -> str:
        """Why the first block that is not published is not."""
        lost, chain = self._state.ledger.lost, self._chain
        reasons = (lost.reason(chain.key(self._published, group)) for group in chain.groups)
        return next((reason for reason in reasons if reason != "absent"), "absent")

    def _count_load(self, started: float, ended: float) -> None:
        """Count how much of a load's time was over before this request asked, and how long the block lay there."""
        counters = self._state.counters
        hidden = max(0.0, min(ended, self._asked) - started)
        counters.load_seconds += ended - started
        counters.hidden_seconds += hidden
        counters.exposed_seconds += ended - started - hidden
        counters.lead_seconds += max(0.0, self._asked - ended)

    def _fit(self, length: int) -> int:
        """How much of a prefix there can be room for."""
        return self._chain.fitting(length, self._state.placement.memory[-1].tier, 1.0)

    def _costs(self, length: int) -> list[float | None]:
        """Seconds that each block of a prefix adds to loading it, as `decide` wants them."""
        state, now = self._state, time.monotonic()
        estimates: dict[tuple[int, int], float | None] = {}
        costs: list[float | None] = [0.0] * length
        self._deviation_s = 0.0
        for (index, group), levels in self._chain.published(length):
            if levels & self._mask:
                continue
            level = (levels & -levels).bit_length() - 1
            kind = (level, group)
            if kind not in estimates:
                found = state.delivery_rates.estimate(level, self._chain.info.sizes[group], now)
                estimates[kind] = found.seconds_per_block if found is not None else None
                self._deviation_s = max(self._deviation_s, found.deviation_s if found is not None else 0.0)
            cost, before = estimates[kind], costs[index]
            costs[index] = None if cost is None or before is None else before + cost
        return costs

    def _block_s(self) -> float | None:
        """Seconds the engine needs to compute one block, if that is known."""
        rate = self._terms.prefill_tokens_per_s or self._state.prefill_rates.tokens_per_s(self._chain.info.name)
        return self._chain.spec.block_tokens / rate if rate else None

    def _want(self, needed: Sequence[Block], *, load: bool) -> None:
        """Pin published blocks and start loading those that are not in memory."""
        warm = len(self._state.placement.memory) - 1
        for block in needed:
            if block in self._wanted:
                continue
            entry = self._state.index.wake(self._chain.key(*block))
            if entry is None:
                continue
            entry.pins += 1
            level = entry.arrival.level if entry.arrival else entry.fastest()
            missing = load and not entry.levels & self._mask
            self._wanted[block] = _Wanted(
                entry,
                level,
                self._loader.want(entry.key, entry.meta.length, warm, self._asked) if missing else None,
            )

    def _unwant(self, keep: Collection[Block] = ()) -> None:
        """Undo `_want`."""
        for block in [block for block in self._wanted if block not in keep]:
            found = self._wanted.pop(block)
            if found.load is not None:
                self._loader.unwant(found.load)
            self._state.placement.unpin(found.entry)
        self._state.room.signal()
