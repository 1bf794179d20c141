"""The observer of a running cache's requests: takes them in without holding them up, and works them up in a thread.

Requests are put in order with the engine's own log of events, which says what left which tier: the order is that of
event numbers, so a block that was evicted after a request asked for it is not held against that request.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Event as Signal
from threading import Lock, Thread
from typing import Any, TypeVar

from tierkv.config import Config
from tierkv.core.engine import Engine
from tierkv.core.events import Event
from tierkv.core.observing import SeenRequest
from tierkv.core.tenants import Tenant
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.result import AuditResult
from tierkv.insight.live.causes import lost_blocks
from tierkv.insight.live.regret import Ghost, Ghosts
from tierkv.insight.live.report import Report, make_report, make_window_report
from tierkv.insight.live.room import Room
from tierkv.insight.live.tally import Tally
from tierkv.insight.live.templates import find_templates
from tierkv.insight.live.tree import Area, PrefixTree
from tierkv.insight.live.windows import TenantTotals, Windows

__all__ = ["Insight"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING_REQUESTS = 4096
_WAITING_BLOCKS = 1 << 18
_PAUSE_S = 0.1
_EVENTS_AT_ONCE = 2048
_VERDICTS_KEPT = 1024  # tenants whose audits are kept


class Insight:
    """Says why prompts were not cached. Safe to use from any thread; `close` it before the engine.

    Parameters
    ----------
    engine
        Whose requests are observed, from now on.
    config
        Of the engine: its tiers' policies, and how much is wanted to know (`config.insight`).
    salt
        Names of templates are hashes with it: the same salt makes the same names.
    """

    def __init__(self, engine: Engine, config: Config, salt: bytes) -> None:
        self._engine = engine
        self._terms = config.insight
        self._salt = salt
        self._queue: list[tuple[SeenRequest, bool]] = []
        self._queued_blocks = 0
        self._dropped = self._dropped_before = 0  # in all, and up to the last time that somebody looked
        self._handing_over = Lock()
        self._working = Lock()  # for all that follows
        self._since = time.time()
        self._tree = PrefixTree()
        self._tenants: dict[bytes, TenantTotals] = {}
        self._windows = Windows(self._since)
        self._room = Room(config, engine.placement)
        memory = [level.tier.name for level in engine.placement.memory]
        self._last_memory, self._last_tier = memory[-1], engine.placement.names[-2]  # the very last is the shared tier
        self._cold = engine.placement.cold.name if engine.placement.cold is not None else None
        self._ghosts = Ghosts(engine.placement.names)
        self._events: deque[Event] = deque()  # read, and not taken in yet
        self._events_read = engine.last_event
        self._audits: dict[bytes, AuditLog] = {}
        self._chance = random.Random(0)
        self._summary: dict[str, Any] = {}
        self._summarise()
        self._stop = Signal()
        self._thread = Thread(target=self._work, name="tierkv-insight", daemon=True)
        self._thread.start()
        engine.observe(self)

    def acquired(self, seen: SeenRequest) -> None:
        """See `tierkv.core.observing.Observer`. What there is no room for is dropped, and counted."""
        if seen.group:
            return  # the first group's request for the same prompt counts
        away = self._engine.shared_away
        with self._handing_over:
            if len(self._queue) >= _WAITING_REQUESTS or self._queued_blocks >= _WAITING_BLOCKS:
                self._dropped += 1
                return
            self._queued_blocks += len(seen.hashes)
            self._queue.append((seen, away))

    def audited(self, tenant: Tenant, results: Sequence[AuditResult]) -> None:
        """Keep the score of audits that a tenant's engine made; one that is not ok raises the alarm in the log.

        Of too many tenants the one that was first to tell is forgotten.
        """
        with self._working:
            kept = self._audits.get(tenant.id)
            if kept is None:
                kept = self._audits[tenant.id] = AuditLog()
                if len(self._audits) > _VERDICTS_KEPT:
                    del self._audits[next(iter(self._audits))]
        for result in results:
            kept.add(result)

    def report(self, tenant: Tenant | None = None) -> Report:
        """Say what was seen so far: of one tenant, or of all. Works up what waits; blocks for some milliseconds."""
        self.catch_up()
        with self._working:
            templates, rest = find_templates(self._tree)
            shown = self._tenants if tenant is None else _only(tenant, self._tenants)
            return make_report(
                shown,
                [found for found in templates if found.area.tenant in shown],
                [(area, tally) for area, tally in rest if area.tenant in shown],
                None if tenant is not None else self._room.estimates(),
                self._audits if tenant is None else _only(tenant, self._audits),
                engine=self._engine,
                terms=self._terms,
                salt=self._salt,
                since=self._since,
                dropped=self._dropped,
            )

    def report_window(self, seconds: float, tenant: Tenant | None = None) -> Report:
        """Say what was counted in the last so many seconds, at most a day. Blocks like `report`."""
        self.catch_up()
        with self._working:
            window = self._windows.last(seconds, time.time())
            shown = window.tenants if tenant is None else _only(tenant, window.tenants)
            return make_window_report(window, seconds, shown, engine=self._engine, terms=self._terms)

    def summary(self) -> dict[str, Any]:
        """Return totals of a moment ago, for stats and metrics. Waits for nothing."""
        return {**self._summary, "dropped": self._dropped}

    def close(self) -> None:
        """Stop observing. Idempotent."""
        self._engine.stop_observing(self)
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                self.catch_up()
                with self._working:
                    self._summarise()
            except Exception:
                log.exception("looking into requests failed unexpectedly")

    def catch_up(self) -> None:
        """Work up what was handed over, one request after the other; whoever waits for the interpreter goes first.

        Blocks, for a fraction of a millisecond each.
        """
        with self._working:
            with self._handing_over:
                batch, self._queue, self._queued_blocks = self._queue, [], 0
                dropped, self._dropped_before = self._dropped - self._dropped_before, self._dropped
            self._windows.dropped(time.time(), dropped)
            batch.sort(key=lambda item: item[0].sequence)
            for seen, away in batch:
                self._follow(seen.sequence)
                self._take_in(seen, away)
                time.sleep(0)
            self._follow(self._engine.last_event)

    def _take_in(self, seen: SeenRequest, away: bool) -> None:
        self._room.request(seen)
        if self._terms.sample < 1.0 and self._chance.random() >= self._terms.sample:
            return
        block_tokens = seen.namespace.spec.block_tokens
        area = Area(seen.tenant.id, seen.namespace.fingerprint, block_tokens)
        walk = self._tree.walk(area, seen.hashes, seen.tokens if self._terms.text else None)
        known = walk.known
        if seen.published < len(seen.hashes):
            known = max(known, self._ghosts.lost_from(seen, seen.published))
        lost = lost_blocks(seen, known, shared_away=away)
        totals = self._tenants.get(seen.tenant.id)
        if totals is None:
            totals = self._tenants[seen.tenant.id] = TenantTotals()
        lately = self._windows.totals(seen.tenant.id, seen.at)
        for tally in (walk.ended.tally, totals.tally, lately.tally):
            tally.note(seen.tiers, lost, block_tokens, seen.block_s)
        for ghost in self._ghosts.wanted(seen, max(known, seen.published)):
            for regret in (totals.regret, lately.regret):
                regret.note(ghost, seen.at, block_tokens)
        self._tree.trim()

    def _follow(self, sequence: int) -> None:
        """Take in the events up to a number."""
        while self._events or self._events_read < sequence:
            if not self._events:
                found, _ = self._engine.events_since(self._events_read, _EVENTS_AT_ONCE)
                if not found:
                    return
                self._events.extend(found)
                self._events_read = found[-1].sequence
            if self._events[0].sequence > sequence:
                return
            event = self._events.popleft()
            tier = self._left(event)
            if tier == self._cold:
                self._room.left_cold()
            if tier:
                self._ghosts.left(event.keys, Ghost(tier, event.sequence, event.at, event.kind == "removed"))

    def _left(self, event: Event) -> str:
        """Return the tier that the blocks of an event left to make room; empty for all other events."""
        if event.kind == "evicted":
            return str(event.details["tier"])
        if event.kind == "removed":
            return {"evicted": self._last_tier, "not_demoted_in_time": self._last_memory}.get(
                event.details["reason"], ""
            )
        return ""

    def _summarise(self) -> None:
        total, regret, audits = Tally(), dict[str, int](), dict[str, int]()
        for tenant in self._tenants.values():
            total.add(tenant.tally)
            for tier, tokens in tenant.regret.tokens().items():
                regret[tier] = regret.get(tier, 0) + tokens
        for kept in self._audits.values():
            for verdict, count in kept.verdicts.items():
                audits[verdict] = audits.get(verdict, 0) + count
        estimates = self._room.estimates()
        self._summary = {
            "requests": total.requests,
            "lost_tokens": dict(total.lost_tokens),
            "regret_tokens": regret,
            "hit_ratio": {
                f"{rate.tier}_x{rate.factor:g}": rate.hit_rate for rate in (estimates.rates if estimates else ())
            },
            "audits": audits,
        }


def _only(tenant: Tenant, found: Mapping[bytes, T]) -> Mapping[bytes, T]:
    return {tenant.id: found[tenant.id]} if tenant.id in found else {}
