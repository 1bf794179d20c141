"""From cache objects to published blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.cache import Cache, Chain, ComputeLease, WriteLease
from tierkv.engines.transformers.layers import RoomyLayer, kv_dtype
from tierkv.errors import LeaseLost, SpecMismatch, TierKVError
from tierkv.spec import KVSpec

__all__ = ["BlockWriter", "store_block"]

_WRITE_TTL_S = 60.0


def store_block(
    spec: KVSpec, past: DynamicCache, lease: WriteLease, index: int, *, row: int = 0, padding: int = 0
) -> None:
    """Copy block `index` of every granted group out of a cache object and commit it.

    Blocks for the copy and the commit, mutates nothing in `past`, and may run while the model appends to `past` if
    `new_cache` or `load_prefix` made it.

    Parameters
    ----------
    row, padding
        Which row of `past`, and how many tokens of padding go before its prompt.

    Raises
    ------
    SpecMismatch
        The tensors in `past` are not of the shape or dtype `spec` says, or no longer hold the block.
    LeaseLost, ChecksumMismatch
        As `WriteLease.commit`.
    """
    dtype = kv_dtype(spec)
    bits = np.dtype(f"i{dtype.itemsize}")
    for number in (grant.group for grant in lease.granted if grant.index == index):
        out = np.frombuffer(lease.buffer(index, number), bits).reshape(spec.layout(number).shape)
        for target, layer in zip(out, spec.groups[number].layers, strict=True):
            held: Any = past.layers[layer]
            # transformers' own sliding layers drop what lies before their window; these here never do.
            dropped = 0 if isinstance(held, RoomyLayer) else held.get_seq_length() - held.keys.shape[-2]
            start = padding + index * spec.block_tokens - dropped
            for plane, tensor in zip(target, (held.keys, held.values), strict=True):
                part = tensor[row, :, max(start, 0) : start + spec.block_tokens]
                if start < 0 or part.dtype != dtype or part.shape != plane.shape:
                    raise SpecMismatch(
                        f"layer {layer} holds {part.dtype} {tuple(part.shape)} of block {index}, the spec says {dtype} "
                        f"{plane.shape}",
                        remedy="make the spec with spec_for from the model that runs, and the cache with new_cache",
                    )
                np.copyto(plane, part.view(getattr(torch, bits.name)).cpu().numpy())
    lease.commit([index])


class BlockWriter:
    """Publishes the blocks of one growing row in order, on its own thread, until the first failure.

    Attributes
    ----------
    stored, errors
        Indices of the blocks it has published, and the slug of each failure; final once it has ended.

    Parameters
    ----------
    cache
        None: nothing is stored.
    compute
        The promise to compute the prompt, which ends when the prompt is stored or cannot be.
    wait_s
        Longest wait for room.
    """

    def __init__(
        self,
        cache: Cache | None,
        spec: KVSpec,
        *,
        compute: ComputeLease | None,
        extra_keys: Mapping[int, bytes] | None,
        session: str,
        wait_s: float,
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._compute = compute
        self._extra_keys = extra_keys
        self._session = session
        self._wait_s = wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierkv-store")
        self._tokens: Sequence[int] = ()
        self._source: tuple[DynamicCache, int, int] | None = None
        self._lease: WriteLease | None = None
        self._todo: list[int] = []
        self._futures: list[Future[None]] = []
        self.stored: list[int] = []
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.submit(self._end)
        self._thread.submit(self._end_compute)
        self._thread.shutdown(wait=True)
        if error is None:
            self.settle()

    def begin(self, tokens: Sequence[int], start: int, past: DynamicCache, *, row: int = 0, padding: int = 0) -> None:
        """Ask for room for the full blocks of `tokens` from block `start` on, which `past` will hold. Does not wait."""
        if self._cache is not None and start < len(tokens) // self._spec.block_tokens:
            self._submit(self._reserve, self._cache, tokens, start, (past, row, padding))

    def advance(self, tokens: int) -> None:
        """Say that the KV of the first `tokens` tokens is complete. Does not wait."""
        if self._cache is not None:
            self._submit(self._store, tokens // self._spec.block_tokens)

    def end_prompt(self) -> None:
        """Say that all of the prompt is computed. Does not wait."""
        self._submit(self._end_compute)

    def settle(self) -> None:
        """Wait until everything said so far is done. Raises what is not the cache's fault."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def _submit(self, job: Any, *arguments: Any) -> None:
        self._futures.append(self._thread.submit(job, *arguments))

    def _reserve(self, cache: Cache, tokens: Sequence[int], start: int, source: tuple[DynamicCache, int, int]) -> None:
        self._end()
        if self.errors:
            return
        try:
            chain = Chain.of(self._spec, tokens, self._extra_keys)
            self._lease = cache.reserve(
                chain, start=start, wait_s=self._wait_s, ttl_s=_WRITE_TTL_S, session=self._session
            )
        except TierKVError as error:
            self._fail(error)
            return
        self._todo, self._tokens, self._source = _reachable(self._lease), tokens, source
        if not self._todo:
            self._end_compute()

    def _store(self, blocks: int) -> None:
        try:
            self._publish(blocks)
        except LeaseLost as error:
            if self._compute is None or self._source is None or self._cache is None:
                self._fail(error)
                return
            # A chunk took longer than was promised. Somebody else may compute now; what is here can still be stored.
            self._end_compute()
            self._reserve(self._cache, self._tokens, self._todo[0], self._source)
            self._store(blocks)
        except TierKVError as error:
            self._fail(error)

    def _publish(self, blocks: int) -> None:
        ready = [index for index in self._todo if index < blocks]
        if self._lease is None or self._source is None or not ready:
            return
        past, row, padding = self._source
        self._lease.renew(_WRITE_TTL_S)
        for index in ready:
            store_block(self._spec, past, self._lease, index, row=row, padding=padding)
            self._todo.remove(index)
            self.stored.append(index)

    def _fail(self, error: TierKVError) -> None:
        self.errors.append(error.slug)
        self._end()
        self._end_compute()

    def _end(self) -> None:
        lease, self._lease, self._todo, self._source = self._lease, None, [], None
        if lease is not None:
            self._attempt(lease.abort)

    def _end_compute(self) -> None:
        lease, self._compute = self._compute, None
        if lease is not None:
            self._attempt(lease.release)

    def _attempt(self, end: Any) -> None:
        try:
            end()
        except TierKVError as error:
            self.errors.append(error.slug)


def _reachable(lease: WriteLease) -> list[int]:
    """Return the granted blocks before the first one without room: nobody could hit those after it."""
    end = min((g.index for g in lease.grants if g.state == "no_room"), default=None)
    return sorted({g.index for g in lease.granted if end is None or g.index < end})
