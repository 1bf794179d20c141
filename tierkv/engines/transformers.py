"""Hugging Face transformers: load a prefix into a cache object the model accepts, store what prefill produced.

`generate` is a complete greedy loop for one prompt; `spec_for`, `load_prefix` and `store_block` are its parts, for
engines that have a loop of their own. Blocks are HND: ``(layers, 2, heads, tokens, head_dim)``, as `DynamicCache` keeps
them. The engine never fails because of its cache: an error there reads as a miss and is counted in the result.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tierkv.cache import Cache, Chain, ReadLease, WriteLease
from tierkv.checkpoint import read_checkpoint
from tierkv.errors import CorruptBlock, InvalidRequest, SpecMismatch, TierKVError
from tierkv.spec import KVSpec

__all__ = ["Generation", "generate", "load_prefix", "spec_for", "store_block"]

_WRITE_TTL_S, _ROOM_WAIT_S = 60.0, 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call of `generate` produced and what it cost.

    Attributes
    ----------
    tokens
        The generated token ids, without the prompt.
    prompt_tokens, reused_tokens, prefilled_tokens
        Length of the prompt, and of it what came from the cache and what was computed.
    tokens_by_tier
        `reused_tokens` by the tier that held them when they were first asked for.
    stored_blocks
        Blocks this call published.
    ttft_s
        Seconds from the call to the first generated token, everything included.
    wait_s, load_s
        Of these, seconds spent waiting for loads from lower tiers, and copying KV into the model's cache object.
    total_s
        Seconds from the call to its return.
    errors
        `TierKVError.slug` of each cache failure that was treated as a miss or as not stored.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    tokens_by_tier: Mapping[str, int]
    stored_blocks: int
    ttft_s: float
    wait_s: float
    load_s: float
    total_s: float
    errors: tuple[str, ...]


def spec_for(
    model: PreTrainedModel, path: str | os.PathLike[str], *, block_tokens: int = 64, adapter: str = ""
) -> KVSpec:
    """Describe the KV of a loaded model.

    Parameters
    ----------
    model
        The model as it will run: its dtype, attention implementation, RoPE settings and quantisation enter the spec.
    path
        The checkpoint it was loaded from, see `tierkv.checkpoint.read_checkpoint`. Blocks on disk reads.
    adapter
        Id of the adapter that is active in `model`.

    Raises
    ------
    InvalidRequest
        No readable checkpoint, an adapter without an id, or KV that `DynamicCache` does not keep as KV heads.
    """
    if not adapter and getattr(model, "peft_config", None):
        raise InvalidRequest(
            "the model carries an adapter that has no id", remedy="pass adapter= a name or a hash of it"
        )
    fields = read_checkpoint(path)
    if any(group.kind == "mla" for group in fields["groups"]):
        raise InvalidRequest(
            f"transformers expands the latents of {fields['model']} into heads, which are not worth storing",
            remedy="serve models with latent attention through an engine that keeps the latents",
        )
    config = model.config.get_text_config().to_dict()
    live = {"implementation": model.config._attn_implementation}
    for name in ("rope_parameters", "rope_theta", "rope_scaling", "quantization_config"):
        if config.get(name) is not None:
            live[name] = json.dumps(config[name], sort_keys=True, default=str)
    dtype = str(model.dtype).removeprefix("torch.")
    attention = {**fields.pop("attention"), **live}
    return KVSpec(**fields, dtype=dtype, block_tokens=block_tokens, order="HND", adapter=adapter, attention=attention)


def load_prefix(model: PreTrainedModel, spec: KVSpec, lease: ReadLease) -> tuple[DynamicCache, int]:
    """Copy the blocks of a read lease into a new cache object on the model's device.

    Returns
    -------
    cache, tokens
        The cache object owns its memory: the lease may end now. `tokens` is ``lease.hit_tokens``. Blocks of a
        sliding-window group that lie before its window may be absent from the lease; they are zeros, and masked.

    Raises
    ------
    CorruptBlock
        A block failed verification and has been removed; acquire again for what is left of the prefix.
    LeaseLost
        The lease ended meanwhile.
    """
    past = DynamicCache()
    size, total = spec.block_tokens, lease.hit_blocks
    dtype, bits = _dtypes(spec)
    layers: dict[int, DynamicLayer] = {}
    for number, group in enumerate(spec.groups):
        layout = spec.layout(number)
        # numpy, not torch: it asks for huge pages, and faulting in 4 KiB pages costs more than the copy itself.
        kv = np.empty((len(group.layers), 2, group.kv_heads, total * size, group.head_dim), bits)
        held = {ref.index for ref in lease.blocks if ref.group == number}
        for index in range(total):
            target = kv[:, :, :, index * size : (index + 1) * size]
            if index in held:
                np.copyto(target, np.frombuffer(lease.view(index, number), bits).reshape(layout.shape))
            else:
                target.fill(0)
        tensor = torch.from_numpy(kv).view(dtype).unsqueeze(2).to(model.device)
        layers |= {layer: _filled_layer(*tensor[row]) for row, layer in enumerate(group.layers)}
    past.layers.extend(layers[layer] for layer in sorted(layers))
    return past, total * size


def store_block(spec: KVSpec, past: DynamicCache, lease: WriteLease, index: int) -> None:
    """Copy block `index` of every granted group out of a cache object and commit it.

    Blocks for the copy and the commit, mutates nothing in `past`, and may run while the model appends to `past`.

    Raises
    ------
    SpecMismatch
        The tensors in `past` are not of the shape or dtype `spec` says.
    LeaseLost, ChecksumMismatch
        As `WriteLease.commit`.
    """
    dtype, bits = _dtypes(spec)
    span = slice(index * spec.block_tokens, (index + 1) * spec.block_tokens)
    for number in (grant.group for grant in lease.granted if grant.index == index):
        out = np.frombuffer(lease.buffer(index, number), bits).reshape(spec.layout(number).shape)
        for row, layer in enumerate(spec.groups[number].layers):
            held: Any = past.layers[layer]
            for plane, tensor in enumerate((held.keys, held.values)):
                part = tensor[0, :, span]
                if part.dtype != dtype or part.shape != out.shape[2:]:
                    raise SpecMismatch(
                        f"layer {layer} holds {part.dtype} {tuple(part.shape)}, the spec says {dtype} {out.shape[2:]}",
                        remedy="make the spec with spec_for from the model that runs",
                    )
                np.copyto(out[row, plane], part.view(getattr(torch, bits.name)).cpu().numpy())
    lease.commit([index])


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    cache: Cache | None,
    spec: KVSpec,
    tokens: Sequence[int],
    max_new_tokens: int,
    *,
    chunk_tokens: int = 256,
    wait_s: float = 10.0,
    store_generated: bool = True,
    extra_keys: Mapping[int, bytes] | None = None,
) -> Generation:
    """Continue a prompt greedily, reusing and storing its KV.

    Parameters
    ----------
    cache
        Where to look for and store KV; `spec` must be registered with it. None: compute everything, by the same path.
    tokens
        The prompt, at least one token. At least its last token is always computed.
    max_new_tokens
        Stop after this many tokens, or at the model's end-of-sequence token.
    chunk_tokens
        Prefill step, a multiple of ``spec.block_tokens``. Steps end at multiples of it whatever was reused, so that
        cached and uncached runs form the same chunks. With the block size itself they are the same matrix products.
    wait_s
        Longest wait, in seconds, for blocks that must be loaded first. Storing waits for room no longer than this,
        and at most a second.
    store_generated
        Also store full blocks that reach into the answer, for the next turn of a conversation.
    extra_keys
        As in `tierkv.keys.chain_hashes`.

    Notes
    -----
    Finished blocks are published on a second thread while the next chunk is computed; all are before the call returns.
    Raises `InvalidRequest` for impossible arguments, and no error of the cache.
    """
    if not tokens or max_new_tokens < 1 or chunk_tokens < 1 or chunk_tokens % spec.block_tokens:
        raise InvalidRequest(
            f"cannot generate {max_new_tokens} tokens from {len(tokens)} in steps of {chunk_tokens}",
            remedy=f"pass tokens, ask for at least one, and step by a multiple of {spec.block_tokens}",
        )
    started = time.perf_counter()
    prefix = _Prefix(DynamicCache()) if cache is None else _reuse(model, cache, spec, tokens, wait_s, extra_keys)
    past, position = prefix.past, prefix.tokens
    answer: list[int] = []
    step = _stepper(model, past)
    with _BlockWriter(cache, spec, past, min(wait_s, _ROOM_WAIT_S)) as writer:
        writer.begin(tokens, position // spec.block_tokens, extra_keys)
        ids = torch.tensor(tokens, device=model.device)
        while position < len(tokens):
            stop = min(len(tokens), (position // chunk_tokens + 1) * chunk_tokens)
            answer = [step(ids[position:stop])]
            position = stop
            writer.advance(position)
        ttft_s = time.perf_counter() - started
        ends = _end_tokens(model)
        while len(answer) < max_new_tokens and answer[-1] not in ends:
            answer.append(step(torch.tensor(answer[-1:], device=model.device)))
        if store_generated:
            known = [*tokens, *answer[:-1]]
            writer.begin(known, len(tokens) // spec.block_tokens, extra_keys)
            writer.advance(len(known))
    return Generation(
        tokens=tuple(answer),
        prompt_tokens=len(tokens),
        reused_tokens=prefix.tokens,
        prefilled_tokens=len(tokens) - prefix.tokens,
        tokens_by_tier=prefix.tokens_by_tier,
        stored_blocks=writer.stored,
        ttft_s=ttft_s,
        wait_s=prefix.wait_s,
        load_s=prefix.load_s,
        total_s=time.perf_counter() - started,
        errors=(*prefix.errors, *writer.errors),
    )


@dataclass(slots=True)
class _Prefix:
    past: DynamicCache
    tokens: int = 0
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    wait_s: float = 0.0
    load_s: float = 0.0
    errors: list[str] = field(default_factory=list)


def _reuse(
    model: PreTrainedModel,
    cache: Cache,
    spec: KVSpec,
    tokens: Sequence[int],
    wait_s: float,
    extra_keys: Mapping[int, bytes] | None,
) -> _Prefix:
    found = _Prefix(DynamicCache())
    chain = Chain.of(spec, tokens, extra_keys)
    for _ in range(2):  # a corrupt block is removed when it is found: the second try gets what lies before it
        try:
            with cache.acquire(chain, wait_s=wait_s, max_blocks=(len(tokens) - 1) // spec.block_tokens) as lease:
                found.wait_s += lease.waited_s
                begun = time.perf_counter()
                if lease.hit_blocks:
                    found.past, found.tokens = load_prefix(model, spec, lease)
                    found.tokens_by_tier = dict(lease.tokens_by_tier)
                found.load_s += time.perf_counter() - begun
            return found
        except CorruptBlock as error:
            found.errors.append(error.slug)
        except TierKVError as error:
            found.errors.append(error.slug)
            return found
    return found


class _BlockWriter:
    """Publishes the blocks of a growing `DynamicCache` in order, on its own thread, until the first failure."""

    def __init__(self, cache: Cache | None, spec: KVSpec, past: DynamicCache, wait_s: float) -> None:
        self._cache = cache
        self._spec = spec
        self._past = past
        self._wait_s = wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierkv-store")
        self._lease: WriteLease | None = None
        self._todo: list[int] = []
        self._futures: list[Future[None]] = []
        self.stored = 0
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=True)
        if error is None:
            for future in self._futures:
                future.result()

    def begin(self, tokens: Sequence[int], start: int, extra_keys: Mapping[int, bytes] | None) -> None:
        """Ask for room for the full blocks of `tokens` from block `start` on. Does not wait."""
        if self._cache is not None and start < len(tokens) // self._spec.block_tokens:
            self._futures.append(self._thread.submit(self._reserve, self._cache, tokens, start, extra_keys))

    def advance(self, tokens: int) -> None:
        """Say that the KV of the first `tokens` tokens is complete. Does not wait."""
        if self._cache is not None:
            self._futures.append(self._thread.submit(self._store, tokens // self._spec.block_tokens))

    def _reserve(self, cache: Cache, tokens: Sequence[int], start: int, extra_keys: Mapping[int, bytes] | None) -> None:
        self._end()
        if self.errors:
            return
        try:
            chain = Chain.of(self._spec, tokens, extra_keys)
            self._lease = cache.reserve(chain, start=start, wait_s=self._wait_s, ttl_s=_WRITE_TTL_S)
            self._todo = _reachable(self._lease)
        except TierKVError as error:
            self.errors.append(error.slug)

    def _store(self, blocks: int) -> None:
        ready = [index for index in self._todo if index < blocks]
        if self._lease is None or not ready:
            return
        try:
            self._lease.renew(_WRITE_TTL_S)
            for index in ready:
                store_block(self._spec, self._past, self._lease, index)
                self._todo.remove(index)
                self.stored += 1
        except TierKVError as error:
            self.errors.append(error.slug)
            self._end()

    def _end(self) -> None:
        lease, self._lease, self._todo = self._lease, None, []
        if lease is None:
            return
        try:
            lease.abort()
        except TierKVError as error:
            self.errors.append(error.slug)


def _reachable(lease: WriteLease) -> list[int]:
    """Return the granted blocks before the first one without room: nobody could hit those after it."""
    end = min((g.index for g in lease.grants if g.state == "no_room"), default=None)
    return sorted({g.index for g in lease.granted if end is None or g.index < end})


def _filled_layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    # DynamicLayer.update would copy the whole prefix once more.
    layer = DynamicLayer()  # type: ignore[no-untyped-call]
    vars(layer).update(keys=keys, values=values, dtype=keys.dtype, device=keys.device, is_initialized=True)
    return layer


def _dtypes(spec: KVSpec) -> tuple[torch.dtype, np.dtype[Any]]:
    """The KV's dtype, and an integer type of its width: numpy has no bfloat16, and copies need none."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype, np.dtype(f"i{dtype.itemsize}")


def _stepper(model: PreTrainedModel, past: DynamicCache) -> Callable[[torch.Tensor], int]:
    """Return a function that appends token ids to `past` and returns the likeliest next token."""
    # forward's name for its cache changed in transformers 5.
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    def step(ids: torch.Tensor) -> int:
        output = model(input_ids=ids.unsqueeze(0), use_cache=True, logits_to_keep=1, **{name: past})
        return int(output.logits[0, -1].argmax())

    return step


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset(found if isinstance(found, Iterable) else [found])
