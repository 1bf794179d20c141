"""The side in vLLM's scheduler: asks the cache what is there, and orders loads and saves.

Runs between two steps of the model: it never waits for the daemon for longer than
`_PATIENCE_S` a step. Questions are asked on threads; a request whose answer is not there yet is asked about again with
the next step, and goes without after `wait_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any
from uuid import uuid4

from tierkv.cache import ComputeLease
from tierkv.engines.vllm.adapters import Adapters
from tierkv.engines.vllm.identity import Geometry, Named
from tierkv.engines.vllm.link import Link
from tierkv.engines.vllm.options import Options
from tierkv.engines.vllm.orders import LoadOrder, Pages, SaveOrder, Step
from tierkv.handles import LeasedReader
from tierkv.keys import adopt_chain
from tierkv.spec import KVSpec

__all__ = ["SchedulerSide"]

_PATIENCE_S = 0.002
_LEASE_S = 60.0
_THREADS = 4
_SAVING_S = 10.0
"""How long an ordered block is taken to be on its way: neighbours with the same prompt do not order it again."""
_NULL_PAGE = 0


@dataclass(slots=True)
class _Found:
    """The published prefix of a prompt, pinned for every rank. `published` may go on where `blocks` ends.

    `compute` is the promise to compute what follows, if other engines may wait for it; `until`, monotonic seconds, is
    when the leases are too old to begin a load under them.
    """

    leases: tuple[LeasedReader, ...]
    blocks: int
    published: int
    compute: ComputeLease | None
    until: float


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request for as long as vLLM has it.

    Attributes
    ----------
    adapter
        Revision of its LoRA adapter, empty for none.
    asked, give_up
        The question what is there, and when to go without an answer (monotonic seconds).
    found
        What is pinned for it, until workers take it over or it is let go.
    settled
        There is nothing to load, or no more: until it has been preempted so many times, it is not asked about.
    published
        The running question how much of it is in the cache, where nothing has to be loaded.
    saved
        Blocks that need no saving: they are in the cache, or on their way. None: nothing more of it can be saved.
    """

    request: Any
    adapter: bytes
    asked: Future[_Found | None] | None = None
    give_up: float = 0.0
    found: _Found | None = None
    compute: ComputeLease | None = None
    loading: bool = False
    settled: float = -1
    published: Future[int] | None = None
    saved: int | None = 0


class SchedulerSide:
    """See the module. All methods are called on the scheduler's thread.

    Parameters
    ----------
    link
        Closed by `close`.
    """

    def __init__(self, link: Link, options: Options, geometry: Geometry) -> None:
        self._link = link
        self._options = options
        self._geometry = geometry
        self._adapters = Adapters()
        self._base: tuple[KVSpec, ...] = ()
        self._epoch = ""
        self._ranks: tuple[Named, ...] = ()
        self._tracked: dict[str, _Tracked] = {}
        self._waiting: list[_Tracked] = []
        self._loads: list[LoadOrder] = []
        self._ordered: dict[bytes, float] = {}
        self._patience_s = _PATIENCE_S
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierkv-ask")

    def know_ranks(self, specs: Sequence[KVSpec]) -> None:
        """Take note of what the workers keep, in the order of their ranks."""
        self._base = tuple(specs)
        self._enter("")

    def new_request(self, request: Any) -> None:
        adapter: bytes | None = b""
        if request.lora_request is not None:
            adapter = self._adapters.revision(request.lora_request.lora_path)
        if not self._ranks or adapter is None:
            self._link.count("requests_without_name")
            return
        tracked = self._tracked[request.request_id] = _Tracked(request, adapter)
        self._waiting.append(tracked)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Say how many tokens beyond the `computed` ones will be loaded, and that it takes a while; None: ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.settled >= request.num_preemptions:
            return 0, False
        block = self._geometry.block_tokens
        limit = (request.num_tokens - 1) // block
        tracked.saved = computed // block
        if limit * block <= computed or request.skip_reading_prefix_cache:
            tracked.published = self._threads.submit(self._lookup, self._ranks, self._hashes(tracked, limit))
        elif not self._answered(tracked, limit):
            return None, False
        elif tracked.found is not None:
            tracked.saved = self._stored(tracked, tracked.found.published)
            tokens = tracked.found.blocks * block - computed
            if tokens > 0:
                return tokens, True
        self._let_go(tracked)
        tracked.settled = request.num_preemptions
        return 0, False

    def allocated(self, request: Any, pages: Sequence[Sequence[int]], external: int) -> None:
        """Note where the pages are into which `external` tokens are loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.loading or tracked.found is None:
            return
        found, tracked.found = tracked.found, None
        tracked.settled = request.num_preemptions
        if not external:
            self._submit(self._release, found.leases)
            return
        stop = found.blocks * self._geometry.pages_per_block
        first = stop - external // self._geometry.page_tokens
        leases = tuple(lease.hand_over() for lease in found.leases)
        wanted = tuple(tuple(p if p != _NULL_PAGE else -1 for p in group[first:stop]) for group in pages)
        self._loads.append(LoadOrder(request.request_id, self._epoch, leases, first, wanted))
        tracked.loading = True
        self._link.count("loads")
        self._link.count("tokens_loading", external)

    def step(self, scheduled: Any) -> Step:
        """Return what workers have to do in the step that has just been scheduled."""
        self._patience_s = _PATIENCE_S
        for tracked in self._waiting:
            # Whoever was scheduled at once has asked already. The others have time.
            if tracked.asked is None and tracked.settled < 0 and not tracked.loading and tracked.found is None:
                blocks = (tracked.request.num_tokens - 1) // self._geometry.block_tokens
                if blocks and tracked.request.request_id in self._tracked:
                    self._submit(self._prefetch, self._hashes(tracked, blocks))
        self._waiting.clear()
        while self._ordered and next(iter(self._ordered.values())) < time.monotonic() - _SAVING_S:
            del self._ordered[next(iter(self._ordered))]
        loads, self._loads = tuple(self._loads), []
        saves = tuple(filter(None, (self._save(scheduled, *item) for item in scheduled.num_scheduled_tokens.items())))
        return Step(loads, saves, idle=not scheduled.num_scheduled_tokens)

    def arrived(self, received: set[str], failed: set[str]) -> None:
        """Note whose pages are filled, and who computes instead."""
        for request_id in received | failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                if request_id in failed:
                    tracked.settled = inf
                    tracked.saved = 0  # what could not be read is gone from the cache; what is there is not written
        self._link.count("loads_failed", len(failed))

    def finished(self, request: Any) -> None:
        """Forget a request: it has ended, however."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._let_go(tracked)
            self._end_compute(tracked)

    def reset(self) -> None:
        """Let nothing that was computed before be found any more, see `identity.Named.of`. Asks the daemon."""
        self._enter(uuid4().hex)

    def close(self) -> None:
        """Give everything back. Blocks for a bounded time."""
        for tracked in list(self._tracked.values()):
            self.finished(tracked.request)
        self._threads.shutdown(wait=True)
        self._link.close()

    def _enter(self, epoch: str) -> None:
        self._epoch = epoch
        self._ranks = tuple(Named.of(spec, epoch) for spec in self._base)
        self._ordered.clear()
        for rank in self._ranks:
            try:
                with self._link.within(self._options.extra_s):
                    self._link.cache.register(rank.spec)
            except Exception as error:  # the daemon is told with the first question that it can answer
                self._link.failed("register", error)

    def _answered(self, tracked: _Tracked, limit: int) -> bool:
        """Ask what is there, or look for the answer; say whether `tracked.found` is it."""
        now = time.monotonic()
        if tracked.found is not None and now < tracked.found.until:
            return True
        self._let_go(tracked, keep_asking=True)
        if tracked.asked is None:
            self._end_compute(tracked)
            tracked.give_up = now + self._options.wait_s + len(self._ranks) * self._options.extra_s
            tracked.asked = self._threads.submit(self._acquire, self._ranks, self._hashes(tracked, limit))
        try:
            found = tracked.asked.result(self._patience_s)
        except NotYet:
            self._patience_s = 0.0
            if now < tracked.give_up:
                return False
            self._link.count("answers_late")
            self._let_go(tracked)
            return True
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - now))
        tracked.asked, tracked.found = None, found
        tracked.compute = None if found is None else found.compute
        return True

    def _let_go(self, tracked: _Tracked, *, keep_asking: bool = False) -> None:
        """Release what is pinned for a request, now or when the answer comes."""
        found, tracked.found = tracked.found, None
        if found is not None:
            self._submit(self._release, found.leases)
        if tracked.asked is not None and not keep_asking:
            asked, tracked.asked = tracked.asked, None
            if not asked.cancel():
                asked.add_done_callback(self._release_late)

    def _release_late(self, asked: Future[_Found | None]) -> None:
        found = asked.result()
        if found is not None:
            self._submit(self._release, found.leases)
            if found.compute is not None:
                self._submit(self._release, (found.compute,))

    def _end_compute(self, tracked: _Tracked) -> None:
        """Give up the promise to compute: it is kept, or will not be."""
        compute, tracked.compute = tracked.compute, None
        if compute is not None:
            self._submit(self._release, (compute,))

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # closing: leases end by their deadlines
            self._threads.submit(work, *arguments)

    # On threads

    def _prefetch(self, hashes: tuple[bytes, ...]) -> None:
        for rank in self._ranks:
            try:
                with self._link.within(self._options.extra_s):
                    self._link.cache.prefetch(rank.chain(hashes))
            except Exception as error:
                self._link.failed("prefetch", error)

    def _lookup(self, ranks: Sequence[Named], hashes: tuple[bytes, ...]) -> int:
        """Return how many blocks of a prompt are published for all ranks. It is served from vLLM's pages: not a use."""
        try:
            with self._link.within(self._options.extra_s):
                return min(self._link.cache.lookup(rank.chain(hashes)).blocks for rank in ranks)
        except Exception as error:
            self._link.failed("lookup", error)
            return len(hashes)

    def _acquire(self, ranks: Sequence[Named], hashes: tuple[bytes, ...]) -> _Found | None:
        """Pin a prefix for all ranks, as long as the shortest of theirs."""
        deadline, until = time.monotonic() + self._options.wait_s, time.monotonic() + _LEASE_S / 2
        leases: dict[Named, LeasedReader] = {}
        compute: ComputeLease | None = None
        blocks = published = len(hashes)
        # One rank asks who computes what is missing, for all of them: they compute together.
        compute_s = self._options.compute_s
        try:
            # A shorter prefix needs other blocks of a window, so whoever has pinned a longer one asks again.
            while todo := [rank for rank in ranks if rank not in leases or leases[rank].hit_blocks > blocks]:
                rank = todo[0]
                if rank in leases:
                    leases.pop(rank).release()
                wait_s = max(0.0, deadline - time.monotonic())
                with self._link.within(wait_s + self._options.extra_s):
                    leases[rank] = lease = self._link.cache.acquire(
                        rank.chain(hashes), wait_s=wait_s, ttl_s=_LEASE_S, max_blocks=blocks, compute_s=compute_s
                    )
                compute, compute_s = compute or lease.compute, 0.0
                blocks, published = lease.hit_blocks, min(published, lease.published_blocks)
            return _Found(tuple(leases[rank] for rank in ranks), blocks, published, compute, until)
        except Exception as error:
            self._link.failed("acquire", error)
        self._release([*leases.values(), *filter(None, [compute])])
        return None

    def _release(self, leases: Iterable[LeasedReader | ComputeLease]) -> None:
        for lease in leases:
            try:
                with self._link.within(self._options.extra_s):
                    lease.release()
            except Exception as error:
                self._link.failed("release", error)

    # Of requests

    def _known(self, tracked: _Tracked) -> bool:
        """Say whether it is known what of a request need not be saved, and take note of the answer."""
        if tracked.published is not None:
            if not tracked.published.done():
                return False
            tracked.saved = self._stored(tracked, tracked.published.result())
            tracked.published = None
        return True

    def _stored(self, tracked: _Tracked, published: int) -> int:
        """Return how many blocks need no saving: the `published` ones, and those behind them that are on their way."""
        hashes = self._hashes(tracked, (tracked.saved or 0))
        while published < len(hashes) and hashes[published] in self._ordered:
            published += 1
        return published

    def _save(self, scheduled: Any, request_id: str, tokens: int) -> SaveOrder | None:
        """Order the blocks that a request completes in this step, if there are any."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.saved is None or not self._known(tracked):
            return None
        geometry, request = self._geometry, tracked.request
        # Tokens that are only drafted, or not known here yet, have no hash.
        hashed = len(request.block_hashes) // geometry.hashes_per_block
        full = min(hashed, (request.num_computed_tokens + tokens) // geometry.block_tokens)
        if full <= tracked.saved:
            return None
        start, tracked.saved = tracked.saved, full
        first, stop = start * geometry.pages_per_block, full * geometry.pages_per_block
        pages: Pages = tuple(
            tuple(group[first:stop]) for group in scheduled.kv_connector_block_state.get_block_ids(request_id)
        )
        if any(_NULL_PAGE in group or len(group) != stop - first for group in pages):
            # A window has left some of them behind: what follows could not be found without them.
            tracked.saved = None
            return None
        hashes = self._hashes(tracked, full)
        self._ordered |= dict.fromkeys(hashes[start:], time.monotonic())
        return SaveOrder(self._epoch, hashes, start, pages)

    def _hashes(self, tracked: _Tracked, blocks: int) -> tuple[bytes, ...]:
        """Return the hashes of a request's first blocks: vLLM's own, each of which covers all tokens before it."""
        step = self._geometry.hashes_per_block
        hashes = tuple(bytes(h) for h in tracked.request.block_hashes[step - 1 : blocks * step : step])
        return tuple(adopt_chain(tracked.adapter, hashes)) if tracked.adapter else hashes
