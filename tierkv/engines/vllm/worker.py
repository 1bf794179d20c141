"""The side in each worker: copies blocks between the cache and vLLM's pages, on threads of its own.

Loads fill pages that vLLM keeps out of use until they are reported, arrived or failed. Saves are copied into staging
memory before a step ends, so that vLLM may do with its pages what it likes, and are stored from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from threading import Condition

import torch

from tierkv.cache import ReadLease
from tierkv.engines.paged import Copy, PagedGroup, open_group, payload_memory
from tierkv.engines.vllm.identity import Geometry, Named
from tierkv.engines.vllm.link import Link
from tierkv.engines.vllm.options import Options
from tierkv.engines.vllm.orders import LoadOrder, SaveOrder
from tierkv.errors import ConfigError, SpecMismatch
from tierkv.spec import KVSpec

__all__ = ["WorkerSide"]

_LOAD_S = 10.0
_SAVE_S = 30.0
_SAVE_LEASE_S = 60.0
_CLOSE_S = 10.0
_IDLE_S = 0.005


@dataclass(frozen=True, slots=True)
class _Staged:
    """Blocks on their way: their copy, and a staging buffer for each."""

    order: SaveOrder
    copies: tuple[Copy, ...]
    buffers: tuple[memoryview, ...]


class WorkerSide:
    """See the module.

    Parameters
    ----------
    link
        Closed by `close`.
    rank
        Position of this worker's lease in a `LoadOrder`.
    """

    def __init__(self, link: Link, options: Options, geometry: Geometry, spec: KVSpec, rank: int) -> None:
        self._link = link
        self._options = options
        self._geometry = geometry
        self._spec = spec
        self._rank = rank
        self._names: dict[str, Named] = {}
        self._groups: list[PagedGroup] = []
        sizes = [spec.layout(group).nbytes for group in range(len(spec.groups))]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._cuts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        count = options.staging_bytes // ends[-1]
        if not count:
            raise ConfigError(
                f"staging_bytes of {options.staging_bytes} cannot hold a block of {ends[-1]} bytes",
                remedy="set it to some hundred MiB",
            )
        self._staging = (ends[-1], count)
        self._free: deque[memoryview] = deque()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._loading = 0
        self._reporting = Condition()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tierkv-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="tierkv-save")

    def use_pages(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take note of vLLM's pages: per KV group its layers' tensors. Raises `SpecMismatch`."""
        page = self._geometry.page_tokens
        self._groups = [open_group(layers, self._spec, group, page) for group, layers in enumerate(caches)]
        self._free = deque(payload_memory(*self._staging, caches[0][0].device))

    def start_loads(self, orders: Sequence[LoadOrder]) -> None:
        """Begin to fill pages. Does not wait."""
        with self._reporting:
            self._loading += len(orders)
        for group in self._groups if orders else ():
            group.follow_engine()
        for order in orders:
            self._loader.submit(self._load, order)

    def start_saves(self, orders: Sequence[SaveOrder]) -> None:
        """Copy blocks out of their pages and begin to store them. Returns when the pages may change."""
        for order in orders:
            try:
                staged = self._stage(order)
            except Exception as error:
                self._link.failed("save", error)
            else:
                if staged is not None:
                    self._saver.submit(self._store, staged)

    def results(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """Return whose loads are over since the last call, and which of them failed.

        `idle`: vLLM has nothing else to do. It would ask again and again, and keep the loading thread from its work:
        wait a little for a load to end.
        """
        with self._reporting:
            if idle and self._loading and not self._received:
                self._reporting.wait(_IDLE_S)
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
        return received, failed

    def close(self) -> None:
        """Finish what has begun, for at most `_CLOSE_S` seconds."""
        ends = [pool.submit(lambda: None) for pool in (self._saver, self._loader)]
        wait_for(ends, _CLOSE_S)
        for pool in (self._saver, self._loader):
            pool.shutdown(wait=False, cancel_futures=True)
        self._link.close()

    def _named(self, epoch: str) -> Named:
        """Return the names of this worker's KV, of which the daemon may have to be told first."""
        if epoch not in self._names:
            named = Named.of(self._spec, epoch)
            self._link.cache.register(named.spec)
            self._names[epoch] = named
        return self._names[epoch]

    def _load(self, order: LoadOrder) -> None:
        lease: ReadLease | None = None
        try:
            with self._link.within(_LOAD_S):
                lease = self._link.cache.take_over(self._named(order.epoch).namespace, order.leases[self._rank])
                self._fill(order, lease)
        except Exception as error:
            self._link.failed("load", error)
            self._release(lease)  # first: damaged blocks are gone when the request begins to store them again
            self._report(order.request_id, failed=True)
        else:
            self._report(order.request_id, failed=False)
            self._release(lease)

    def _report(self, request_id: str, *, failed: bool) -> None:
        with self._reporting:
            self._loading -= 1
            self._received.add(request_id)
            if failed:
                self._failed.add(request_id)
            self._reporting.notify_all()

    def _release(self, lease: ReadLease | None) -> None:
        if lease is not None:
            try:
                with self._link.within(self._options.extra_s):
                    lease.release()
            except Exception as error:
                self._link.failed("release", error)

    def _fill(self, order: LoadOrder, lease: ReadLease) -> None:
        per_block = self._geometry.pages_per_block
        # Pages before the first one to fill are other requests' too, and not to be touched.
        before = (-1,) * (order.first_page % per_block)
        for group, pages in enumerate(order.pages):
            table = before + pages
            if len(table) % per_block:
                raise SpecMismatch(f"{len(table)} pages are not whole blocks of {per_block}")
            for at in range(0, len(table), per_block):
                wanted = table[at : at + per_block]
                if max(wanted) >= 0:
                    block = (order.first_page + at) // per_block
                    self._groups[group].load(lease.view(block, group), wanted)

    def _stage(self, order: SaveOrder) -> _Staged | None:
        """Copy as many blocks as there is staging memory for, the first ones first."""
        per_block = self._geometry.pages_per_block
        buffers: list[memoryview] = []
        for _ in range(order.start, len(order.hashes)):
            try:
                buffers.append(self._free.popleft())
            except IndexError:
                break
        self._link.count("blocks_dropped", len(order.hashes) - order.start - len(buffers))
        try:
            copies = [
                self._groups[group].start_save(
                    [
                        (pages[i * per_block : (i + 1) * per_block], buffer[self._cuts[group]])
                        for i, buffer in enumerate(buffers)
                    ]
                )
                for group, pages in enumerate(order.pages)
            ]
        except BaseException:
            self._free.extend(buffers)
            raise
        return _Staged(order, tuple(copies), tuple(buffers)) if buffers else None

    def _store(self, staged: _Staged) -> None:
        try:
            for copy in staged.copies:
                copy.wait()
            with self._link.within(_SAVE_S):
                self._link.count("blocks_stored", self._write(staged))
        except Exception as error:
            self._link.failed("save", error)
        finally:
            self._free.extend(staged.buffers)

    def _write(self, staged: _Staged) -> int:
        order = staged.order
        stop = order.start + len(staged.buffers)
        chain = self._named(order.epoch).chain(order.hashes[:stop])
        with self._link.cache.reserve(chain, start=order.start, ttl_s=_SAVE_LEASE_S) as lease:
            # Nobody could find what follows a block that has found no room.
            end = min((grant.index for grant in lease.grants if grant.state == "no_room"), default=stop)
            granted = [grant for grant in lease.granted if grant.index < end]
            for grant in granted:
                buffer = staged.buffers[grant.index - order.start]
                lease.write(grant.index, buffer[self._cuts[grant.group]], grant.group)
            self._link.count("blocks_without_room", stop - end)
            return lease.commit({grant.index for grant in granted}) if granted else 0
