"""What the cache has of a prompt, with every failure read as a miss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import DynamicCache, PreTrainedModel

from tierkv.cache import Cache, Chain, ComputeLease
from tierkv.engines.transformers.layers import new_cache
from tierkv.engines.transformers.loading import load_prefix
from tierkv.errors import CorruptBlock, TierKVError
from tierkv.spec import KVSpec

__all__ = ["Prefix", "Request", "reuse"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how to ask the cache for it. Fields as the arguments of `generate`."""

    tokens: Sequence[int]
    extra_keys: Mapping[int, bytes] | None
    session: str
    wait_s: float
    compute_s: float


@dataclass(slots=True)
class Prefix:
    """What was found: a cache object with the KV of the first `tokens` tokens, and what that took.

    `compute` is the promise to compute the rest, if it fell to this request.
    """

    past: DynamicCache
    tokens: int = 0
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    saved_s: float = 0.0
    wait_s: float = 0.0
    load_s: float = 0.0
    compute: ComputeLease | None = None
    errors: list[str] = field(default_factory=list)


def reuse(model: PreTrainedModel, cache: Cache | None, spec: KVSpec, request: Request, room: int) -> Prefix:
    """Load the longest prefix the cache has, into a cache object with room for `room` tokens in all.

    Blocks no longer than the request's `wait_s`, and for the copy. Raises no error of the cache.
    """
    errors: list[str] = []
    for _ in range(2):  # a corrupt block is removed when it is found: the second try gets what lies before it
        found = None
        try:
            if cache is not None:
                found = _load(model, cache, spec, request, room)
        except CorruptBlock as error:
            errors.append(error.slug)
            continue
        except TierKVError as error:
            errors.append(error.slug)
        break
    found = found or Prefix(new_cache(model, room=room))
    found.errors = errors
    return found


def _load(model: PreTrainedModel, cache: Cache, spec: KVSpec, request: Request, room: int) -> Prefix:
    chain = Chain.of(spec, request.tokens, request.extra_keys)
    most = (len(request.tokens) - 1) // spec.block_tokens
    with cache.acquire(
        chain, wait_s=request.wait_s, max_blocks=most, compute_s=request.compute_s, session=request.session
    ) as lease:
        begun = time.perf_counter()
        try:
            if lease.hit_blocks:
                past, tokens = load_prefix(model, spec, lease, room=max(0, room - lease.hit_tokens))
            else:
                past, tokens = new_cache(model, room=room), 0
        except BaseException:
            if lease.compute is not None:
                lease.compute.release()
            raise
        return Prefix(
            past=past,
            tokens=tokens,
            tokens_by_tier=dict(lease.tokens_by_tier) if tokens else {},
            saved_s=lease.saved_s,
            wait_s=lease.waited_s,
            load_s=time.perf_counter() - begun,
            compute=lease.compute,
        )
