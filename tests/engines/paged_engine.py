"""An engine with pages and no model: its KV is a function of the tokens, so that any page can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from tierkv.engines.vllm.identity import Geometry
from tierkv.engines.vllm.link import Link, open_link
from tierkv.engines.vllm.options import Options, parse_options
from tierkv.engines.vllm.orders import Step
from tierkv.engines.vllm.scheduler import SchedulerSide
from tierkv.engines.vllm.worker import WorkerSide
from tierkv.spec import KVGroup, KVSpec

PAGE, BLOCK, PAGES = 4, 8, 64
FULL = KVGroup((0, 2), "full", 2, 4)
SLIDING = KVGroup((1,), "sliding_window", 2, 4, window=12)
PATIENCE_S = 20.0
CONFIG: dict[str, Any] = {"warm": {"capacity": "16MiB"}}


def spec_of(*groups: KVGroup, weights: str = "w", rank: int = 0, ranks: int = 1) -> KVSpec:
    return KVSpec("m", weights, "float32", BLOCK, groups, order="HND", tp_rank=rank, tp_size=ranks)


@dataclass(eq=False)
class Request:
    """What the scheduler's side looks at in a request of vLLM."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    digests: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        parent, self.digests = b"", []
        for token in self.tokens:
            parent = sha256(parent + token.to_bytes(4)).digest()
            self.digests.append(parent)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.digests[PAGE - 1 :: PAGE]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _BlockState:
    pages: tuple[list[int], ...]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.pages


@dataclass(frozen=True)
class _Scheduled:
    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: _BlockState


@dataclass(frozen=True)
class Ran:
    """One request: the tokens that were loaded, and whether that failed."""

    external: int
    failed: bool


class PagedEngine:
    """Both sides of the connector, one scheduler and a worker per rank, on pages of their own."""

    def __init__(self, *specs: KVSpec, link: Link, options: Options) -> None:
        self.specs = specs
        self.link = link
        geometry = Geometry(BLOCK, PAGE, PAGE, len(specs[0].groups))
        self.scheduler = SchedulerSide(link, options, geometry)
        self.scheduler.know_ranks(specs)
        self.workers = [WorkerSide(link, options, geometry, spec, rank) for rank, spec in enumerate(specs)]
        self.caches = [
            [
                [torch.zeros(PAGES, group.kv_heads, PAGE, 2 * group.head_dim) for _ in group.layers]
                for group in spec.groups
            ]
            for spec in specs
        ]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.use_pages(caches)
        self._next = 1

    def pages(self, request: Request, tokens: int) -> tuple[list[int], ...]:
        """Allocate pages for so many tokens in every group; those that the window has left behind are page 0."""
        tables = []
        for group in self.specs[0].groups:
            first = max(0, tokens - group.window + 1) // PAGE if group.window else 0
            count = -(-request.num_tokens // PAGE)
            table = [0] * min(first, count)
            while len(table) < count:
                table.append(self._next)
                self._next = self._next % (PAGES - 1) + 1
            tables.append(table)
        return tuple(tables)

    def ask(self, request: Request, computed: int = 0) -> int:
        """Ask until there is an answer, as vLLM does step by step."""
        deadline = monotonic() + PATIENCE_S
        while True:
            tokens, _ = self.scheduler.matched_tokens(request, computed)
            if tokens is not None:
                return tokens
            assert monotonic() < deadline, "there never was an answer"
            self.pass_by()

    def pass_by(self) -> Step:
        """A step in which nothing is scheduled."""
        return self.scheduler.step(_Scheduled({}, _BlockState(())))

    def run(self, request: Request, *, local: int = 0, chunk: int = 1000, check: bool = True) -> Ran:
        """Serve a request of which `local` tokens are in pages already; check every page that was loaded."""
        self.scheduler.new_request(request)
        external = self.ask(request, local)
        tables = self.pages(request, local + external)
        self.fill(request, tables, 0, local)
        self.scheduler.allocated(request, tables, external)
        failed = False
        if external:
            before = [[[layer.clone() for layer in group] for group in rank] for rank in self.caches]
            step = self.scheduler.step(_Scheduled({}, _BlockState(tables)))
            failed = self.load(request, step)
            if not failed and check:
                self.check(request, tables, local, local + external, before)
        if failed:
            tables = self.pages(request, 0)
        request.num_computed_tokens = 0 if failed else local + external
        tracked = self.scheduler._tracked.get(request.request_id)
        if tracked is not None and tracked.published is not None:
            tracked.published.result(PATIENCE_S)
        while request.num_computed_tokens < request.num_tokens:
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            step = self.order(request, tables, count)
            self.fill(request, tables, request.num_computed_tokens, request.num_computed_tokens + count)
            for worker in self.workers:
                worker.start_saves(step.saves)
            request.num_computed_tokens += count
        for rank in self.caches:
            for group in rank:
                for layer in group:
                    layer.fill_(-1)  # the pages are somebody else's now
        self.scheduler.finished(request)
        return Ran(external, failed)

    def order(self, request: Request, tables: tuple[list[int], ...], tokens: int) -> Step:
        """A step in which so many tokens of a request are computed."""
        return self.scheduler.step(_Scheduled({request.request_id: tokens}, _BlockState(tables)))

    def load(self, request: Request, step: Step) -> bool:
        """Have all workers load, wait for them, and say whether any failed."""
        deadline, failures = monotonic() + PATIENCE_S, set()
        for worker in self.workers:
            worker.start_loads(step.loads)
        for worker in self.workers:
            received: set[str] = set()
            while request.request_id not in received:
                assert monotonic() < deadline, "the load never ended"
                received, failed = worker.results()
                failures |= failed
        self.scheduler.arrived({request.request_id}, failures)
        return bool(failures)

    def settle(self) -> None:
        """Wait until everything that was ordered is stored, and every lease that is over has ended."""
        for worker in self.workers:
            _, late = wait_for([worker._saver.submit(lambda: None)], PATIENCE_S)
            assert not late
        deadline = monotonic() + PATIENCE_S
        while any(self.link.cache.stats()["leases"].values()):
            assert monotonic() < deadline, "a lease was never given back"

    def stop(self) -> None:
        """End its threads."""
        self.scheduler._threads.shutdown()
        for worker in self.workers:
            worker._loader.shutdown()
            worker._saver.shutdown()

    def fill(self, request: Request, tables: Sequence[Sequence[int]], start: int, stop: int) -> None:
        """Write the KV of some tokens into their pages."""
        for rank, number, layer, cache in self._layers():
            for position in range(start, stop):
                page = tables[number][position // PAGE]
                if page:
                    cache[page, :, position % PAGE] = self.kv(rank, number, layer, request, position)

    def check(
        self,
        request: Request,
        tables: Sequence[Sequence[int]],
        start: int,
        stop: int,
        before: Sequence[Sequence[Sequence[torch.Tensor]]],
    ) -> None:
        """Check that pages of tokens ``[start, stop)`` hold their KV, and that no other page was written."""
        for rank, number, layer, cache in self._layers():
            expected = before[rank][number][layer].clone()
            for position in range(start, stop):
                page = tables[number][position // PAGE]
                if page:
                    expected[page, :, position % PAGE] = self.kv(rank, number, layer, request, position)
            assert torch.equal(cache, expected)

    def kv(self, rank: int, group: int, layer: int, request: Request, position: int) -> torch.Tensor:
        """What the layer keeps at a position: it depends on all tokens up to there, and on the model."""
        spec = self.specs[rank]
        seed = f"{spec.weights} {spec.tp_rank} {group} {layer}".encode()
        shape = (spec.groups[group].kv_heads, 2 * spec.groups[group].head_dim)
        numbers = np.frombuffer(sha256(seed + request.digests[position]).digest(), np.uint8)
        return torch.from_numpy(np.resize(numbers.astype(np.float32), shape))

    def _layers(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        for rank, groups in enumerate(self.caches):
            for number, layers in enumerate(groups):
                for layer, cache in enumerate(layers):
                    yield rank, number, layer, cache


class Bench:
    """A cache in this process, and engines that use it."""

    def __init__(self, link: Link, options: Options) -> None:
        self.link = link
        self.options = options
        self.engines: list[PagedEngine] = []

    def engine(self, *specs: KVSpec, **changes: Any) -> PagedEngine:
        options = self.options.model_copy(update=changes)
        self.engines.append(PagedEngine(*(specs or (spec_of(FULL, SLIDING),)), link=self.link, options=options))
        return self.engines[-1]


@contextmanager
def opened(**options: Any) -> Iterator[Bench]:
    parsed = parse_options({"config": CONFIG, "staging_bytes": "1MiB", **options})
    bench = Bench(open_link(parsed, uuid4().hex), parsed)
    cache = bench.link.cache
    try:
        yield bench
    finally:
        for engine in bench.engines:
            engine.stop()
        bench.link.cache = cache
        bench.link.close()
