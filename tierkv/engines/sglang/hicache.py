"""The storage backend: `HiCacheStorage` over a tierkv cache."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from tierkv.cache import Chain, ReadLease, WriteLease
from tierkv.engines.sglang.options import Options, identity_of, ranks_of
from tierkv.engines.sglang.pages import HiCachePages
from tierkv.errors import ConfigError, CorruptBlock, InvalidRequest, LeaseLost, TierKVError
from tierkv.keys import adopt_chain, chain_root
from tierkv.spec import KVSpec

__all__ = ["TierKVHiCache"]

log = logging.getLogger(__name__)

RESERVED_BYTES = 16 << 20
"""Room is asked for in portions of so many bytes: a batch of pages can be more than the warm tier holds."""


class TierKVHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no type hints for checkers
    """A tierkv cache behind ``HiCacheStorage``: ``cls(storage_config, kwargs)``, as the dynamic backend makes it.

    Attributes
    ----------
    spec
        What the pages are; known once the host pool is.
    errors
        How often something failed and was taken for a miss, by `TierKVError.slug` (other errors by class). Failures
        to reach a daemon are misses already where they happen, and counted there: `FailOpenCache.health`.

    Raises
    ------
    ConfigError
        The extra config is wrong, the revision of the weights is not known, or context parallelism splits pages
        between ranks (DCP).
    """

    spec: KVSpec

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        self._options = Options.read(storage_config.extra_config)
        self._ranks = ranks_of(storage_config)
        self._identity = identity_of(storage_config.model_name or "", self._options)
        self._keeps_metrics = bool(storage_config.enable_storage_metrics)
        self._lock = Lock()
        self._transfers: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}
        self.errors: Counter[str] = Counter()
        self._cache = self._options.open()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where pages lie. Raises `ConfigError` for a pool that cannot be stored, `SpecMismatch` for pages that
        the cache cannot hold."""
        super().register_mem_pool_host(mem_pool_host)
        self._pages = pages = HiCachePages(mem_pool_host, self._options.kv_dtype)
        extra = {"engine": "sglang"} | ({"draft_layers": str(pages.drafts)} if pages.drafts else {})
        extra |= {"device_layout": pages.device_layout} if pages.device_layout != "nhd" else {}
        self.spec = KVSpec(
            dtype=pages.dtype,
            block_tokens=pages.tokens,
            groups=(pages.group,),
            extra=extra,
            **self._identity,
            **self._ranks,
        )
        self._root = chain_root(self.spec.fingerprint)
        self._namespace = self._cache.register(self.spec)
        log.info("pages of %d bytes are kept in namespace %s", self.spec.layout().nbytes, self._namespace)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse what is not KV of every token: a prefix without it would be another model's. Raises `ConfigError`."""
        name = getattr(host_pool_name, "value", host_pool_name)
        if name != "kv":
            raise ConfigError(
                f"this model keeps a state of its own beside its KV (pool {name!r}), which tierkv does not store",
                remedy="serve models with sliding windows, recurrent state, indexers or draft models without it",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many of `keys`, from the first, are stored. Pages before them are the caller's business."""
        found = [0]

        def look() -> None:
            found[0] = self._cache.lookup(self._chain(keys), wait_s=self._options.wait_s).blocks

        self._attempt(look)
        return found[0]

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the host pool; say which were, none after the first that was not. That one may hold garbage."""
        return self._read(keys, lambda: self._at(keys, host_indices))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool; say which are stored, or being stored by somebody else."""
        before = list(extra_info.prefix_keys or ()) if extra_info is not None else []
        return self._write(before, keys, lambda: self._at(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill a flat page and return it, None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill flat pages; return them, and None from the first miss on."""
        given = list(target_locations) if target_locations is not None else [None] * len(keys)
        flat = [self.mem_pool_host.get_dummy_flat_data_page() if page is None else page for page in given]
        filled = self._read(keys, lambda: [self._pages.of(page) for page in flat])
        return [page if good else None for page, good in zip(flat, filled, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; say whether all are stored."""
        flat = target_locations if values is None else values
        return all(self._write([], keys, lambda: [self._pages.of(page) for page in flat]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Unpublish this tenant's pages of this model, shape and rank, in all tiers."""
        self._attempt(lambda: self._cache.clear(self._namespace))

    def get_stats(self) -> Any:
        """Return pages and GB/s of the transfers since the last call, as SGLang's metrics want them; None if not."""
        if not self._keeps_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken, self._transfers = self._transfers, {"prefetch": [], "backup": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in taken["prefetch"]],
            backup_pgs=[pages for pages, _ in taken["backup"]],
            prefetch_bandwidth=[rate for _, rate in taken["prefetch"]],
            backup_bandwidth=[rate for _, rate in taken["backup"]],
        )

    def close(self) -> None:
        """Flush and close an embedded cache, or end the connection. Idempotent."""
        self._attempt(self._cache.close)

    def _read(self, keys: Sequence[str], find: Callable[[], list[NDArray[Any]]]) -> list[bool]:
        filled = [False] * len(keys)

        def read() -> None:
            targets, chain = find(), self._chain(keys)
            deadline = time.monotonic() + self._options.wait_s
            done = 0
            while done < len(targets):
                rest = Chain(chain.namespace, chain.hashes[done:])
                with self._cache.acquire(rest, wait_s=max(0.0, deadline - time.monotonic())) as lease:
                    copied = self._copy_out(lease, targets[done:])
                filled[done : done + copied] = [True] * copied
                done += copied
                if not copied or lease.published_blocks <= copied:  # else there was no room for more at once
                    break

        self._timed("prefetch", read, filled)
        return filled

    def _copy_out(self, lease: ReadLease, targets: Sequence[NDArray[Any]]) -> int:
        """Copy blocks into pages; return how many are good."""
        copied = 0
        try:
            for index in range(lease.hit_blocks):
                np.copyto(targets[index], self._pages.in_block(lease.view(index)))
                copied += 1
            if copied:
                lease.view(copied - 1)  # raises if the lease ended while the last page was copied
        except CorruptBlock as error:
            self._failed(error)
        except LeaseLost as error:
            self._failed(error)
            return 0
        return copied

    def _write(self, before: Sequence[str], keys: Sequence[str], find: Callable[[], list[NDArray[Any]]]) -> list[bool]:
        stored = [False] * len(keys)

        def write() -> None:
            sources, chain, start = find(), self._chain([*before, *keys]), len(before)
            if start and not self._cache.lookup(Chain(chain.namespace, chain.hashes[start - 1 : start])).blocks:
                # Its predecessor is gone: in its chain this page would wait for it, and nobody could hit it.
                chain, start = Chain(chain.namespace, chain.hashes[start:]), 0
            deadline = time.monotonic() + self._options.room_wait_s
            step = max(1, RESERVED_BYTES // self.spec.layout().nbytes)
            for first in range(0, len(sources), step):
                last = min(first + step, len(sources))
                wait_s = max(0.0, deadline - time.monotonic())
                with self._cache.reserve(chain, start=start + first, stop=start + last, wait_s=wait_s) as lease:
                    self._copy_in(lease, sources, start, stored)
                if not all(stored[first:last]):
                    break

        self._timed("backup", write, stored)
        return stored

    def _copy_in(self, lease: WriteLease, sources: Sequence[NDArray[Any]], start: int, stored: list[bool]) -> None:
        """Copy pages into the blocks that were granted and publish them."""
        granted = [grant.index for grant in lease.granted]
        for index in granted:
            np.copyto(self._pages.in_block(lease.buffer(index)), sources[index - start])
        accepted = bool(granted) and lease.commit(granted) == len(granted)
        for grant in lease.grants:
            stored[grant.index - start] = accepted if grant.state == "granted" else grant.state != "no_room"

    def _chain(self, keys: Sequence[str]) -> Chain:
        return Chain(self._namespace, tuple(adopt_chain(self._root, [bytes.fromhex(key) for key in keys])))

    def _at(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[NDArray[Any]]:
        """Return the pages of the host pool that indices of their tokens say."""
        if len(host_indices) != len(keys) * self._pages.tokens:
            raise InvalidRequest(
                f"{len(host_indices)} indices are not {len(keys)} pages of {self._pages.tokens} tokens"
            )
        return [self._pages.page(index) for index in host_indices[:: self._pages.tokens].tolist()]

    def _timed(self, kind: str, work: Callable[[], None], done: Sequence[bool]) -> None:
        begun = time.monotonic()
        self._attempt(work)
        pages, seconds = sum(done), time.monotonic() - begun
        if self._keeps_metrics and pages:
            with self._lock:
                self._transfers[kind].append((pages, pages * self.spec.layout().nbytes / max(seconds, 1e-9) / 1e9))

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do something that may come to nothing. SGLang's threads must outlive whatever happens in it."""
        try:
            work()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Count a failure and tell the log about the first of each kind."""
        expected = isinstance(error, TierKVError)
        kind = error.slug if isinstance(error, TierKVError) else type(error).__name__
        with self._lock:
            self.errors[kind] += 1
            first = self.errors[kind] == 1
        if first:
            log.warning("taken for a miss, as all of its kind from now on: %s", error, exc_info=not expected)
