"""One acquire, from the question to the lease: what to load, what to wait for, what to pin.

All methods run with the engine's lock held. `begin` and `look` say what to wait for next, or None when the answer is
there. The order of things: ask the shared tier for what is not on this machine; load the part of the published prefix
that pays; wait for those loads as long as that pays; then, where somebody else computes what is missing, wait for it;
then pin what is in memory.
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
from tierkv.core.leases import LeaseTable, ReadRecord
from tierkv.core.load import Load
from tierkv.core.loads import Loader
from tierkv.core.observing import SeenRequest
from tierkv.core.others import ComputeGrant, Others
from tierkv.core.payoff import TOLERANCE, Patience, decide, quiet_s
from tierkv.core.state import State
from tierkv.core.steps import Pause
from tierkv.core.tenants import Tenant

__all__ = ["Acquired", "Acquisition", "Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller of acquire asks for; the parameters of `tierkv.cache.Cache.acquire`.

    Attributes
    ----------
    tiers
        The memory tiers the caller can read in place.
    tokens
        Token ids of the chain, for an observer that may keep them.
    """

    tiers: frozenset[str]
    wait_s: float
    ttl_s: float
    max_blocks: int | None = None
    compute_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    session: str = ""
    groups: tuple[int, ...] | None = None
    handoff: bool = False
    tokens: Sequence[int] | None = None


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
        self._until = 0.0
        self._loading_since = self._asked
        self._deviation_s = 0.0
        self._probe: Future[bool] | None = None
        self._others = Others(
            state,
            computing,
            tenant,
            compute_s=terms.compute_s,
            handoff=terms.handoff,
            deadline=self._deadline,
        )
        self._result: Acquired | None = None

    @property
    def holding(self) -> bool:
        return bool(self._wanted) or self._others.waiting

    def result(self) -> Acquired:
        """The answer, once `begin` or `look` has returned None."""
        assert self._result is not None
        return self._result

    def seen(self) -> SeenRequest:
        """Say for an observer what this request was; once there is a `result`. Needs no lock."""
        result, missed = self._result, self._missed_blocks
        assert result is not None
        return SeenRequest(
            self._sequence,
            time.time(),
            self._tenant,
            self._chain.info,
            self._chain.groups[0],
            self._hashes[: self._total],
            self._tiers,
            self._published,
            missed,
            next(iter(missed)) if self._published < self._total else "",
            self._terms.session,
            result.waited_s,
            result.saved_s,
            self._block_seconds,
            self._terms.tokens,
        )

    def begin(self, namespace: str, hashes: Sequence[bytes]) -> Pause | None:
        """Start loading what pays. Raises `NotFound` for an unknown namespace."""
        terms = self._terms
        self._state.sessions.check(terms.session)
        self._hashes = hashes
        self._chain = ChainView(self._state, self._tenant, namespace, hashes, terms.groups)
        self._total = len(hashes) if terms.max_blocks is None else max(0, min(len(hashes), terms.max_blocks))
        for memory in self._state.placement.memory:
            memory.order.seen(self._tenant.id)
        pause = self._ask_elsewhere()
        if pause is not None:
            return pause
        self._start_loads()
        return self._next()

    def look(self) -> Pause | None:
        """Go on after a pause."""
        self._paused = True
        if self._probe is not None:
            assert self._state.sharing is not None
            in_time = self._probe.done() and self._probe.result()
            self._state.sharing.counts.probes["answered" if in_time else "late"] += 1
            self._probe = None
            self._start_loads()
        self._others.leave()
        return self._next()

    def let_go(self) -> None:
        """Give up pins, loads and waiting."""
        self._unwant()
        self._others.leave()

    def _ask_elsewhere(self) -> Pause | None:
        """Ask the shared tier for what is not on this machine, and wait for the answer for a moment.

        A question must not cost what it cannot bring in: a request that could be computed in no time waits for none.
        """
        sharing, chain = self._state.sharing, self._chain
        if sharing is None:
            return None
        sharing.seen(self._tenant.id, chain.info.fingerprint)
        here = chain.hit(self._total)
        self._probe = sharing.ask(chain, here, self._total) if here < self._total else None
        if self._probe is None:
            return None
        block_s = self._block_s()
        worth_s = TOLERANCE * (self._total - here) * block_s if block_s is not None else sharing.probe_s
        until = self._asked + min(self._terms.wait_s, sharing.probe_s, worth_s)
        if time.monotonic() >= until:
            self._probe = None
            return None
        return Pause([self._probe], until)

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
            complete = self._target >= self._published
            pause = self._others.look(self._chain, self._published, self._total, now, complete=complete)
            if pause is None:
                self._pin(now)
            return pause

    def _worth_waiting(self, now: float) -> bool:
        """Ask patience; without a prefill rate to compare with, whether anything comes at all."""
        if now < self._until:
            return True
        if self._patience is None:
            self._until = self._silent_until()
            return now < self._until
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

    def _silent_until(self) -> float:
        """Until when a shared tier may go on to bring nothing. A disk that hangs is no moment's trouble."""
        afar = self._state.placement.shared_level
        if not any(w.level == afar and w.load is not None and not w.load.future.done() for w in self._wanted.values()):
            return float("inf")
        heard = max(self._loading_since, self._state.delivery_rates.latest(afar))
        return heard + quiet_s(self._costs(self._target), self._deviation_s)

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
        if self._others.since is None or self._target < self._fitting:
            return False
        published = self._chain.hit(self._total)
        if published <= self._published:
            return False
        self._published = published
        self._fitting = self._target = self._planned = self._fit(published)
        self._want(self._chain.needed(self._target), load=time.monotonic() < self._deadline)
        return True

    def _pin(self, now: float) -> None:
        """Turn the resident prefix into a lease."""
        state, chain, terms, wanted = self._state, self._chain, self._terms, self._wanted
        placement = state.placement
        length = chain.hit(self._published, self._mask)
        waited_s = now - self._asked if self._paused else 0.0
        missed = self._missed_blocks = self._missed(length)
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
        if state.sharing is not None:
            self._tell_of_arrivals(entries, refs)
        fresh = {id(w.entry) for w in wanted.values() if w.load is not None}
        for entry in reversed(entries):
            placement.touch(entry, again=entry.arrival is None and id(entry) not in fresh)
            entry.arrival = None
        if state.sharing is not None:
            state.sharing.used(entries)
        state.breakpoints.hit(state.leases, self._tenant.id, chain.info.name, self._hashes[:length], now)
        placement.touch_cold([entry.key for entry in reversed(entries)])
        self._tiers = [placement.names[level] for level in slowest]
        by_tier = Counter(self._tiers)
        tokens_by_tier = {name: count * chain.spec.block_tokens for name, count in by_tier.items()}
        block_tokens, tokens = chain.spec.block_tokens, length * chain.spec.block_tokens
        requested = self._total * block_tokens
        self._block_seconds = self._block_s()
        saved_s = max(0.0, length * (self._block_seconds or 0.0) - waited_s)
        self._sequence = state.ledger.acquired(
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
            self._others.grant,
            self._others.elsewhere,
        )

    def _tell_of_arrivals(self, entries: Sequence[Entry], refs: Sequence[BlockRef]) -> None:
        """Say which blocks have come from the shared tier: they are this machine's own now."""
        afar = self._state.placement.shared_level
        came = [(e, r) for e, r in zip(entries, refs, strict=True) if e.arrival is not None and e.arrival.level == afar]
        if came:
            hashes = [self._hashes[ref.index] for _, ref in came]
            self._state.ledger.arrived([entry for entry, _ in came], hashes, [ref.tier for _, ref in came])

    def _missed(self, length: int) -> dict[str, int]:
        """Blocks that were asked for and are not part of a prefix of `length`, by reason."""
        if self._others.since is not None:
            shared = max(0, length - self._others.since) * self._chain.spec.block_tokens
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
        self._loading_since = time.monotonic()
        if self._patience is None:
            self._until = 0.0
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
