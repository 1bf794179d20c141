"""Greedy generation that reuses and stores KV."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from tierkv.cache import Cache
from tierkv.engines.transformers.forward import Forward, end_tokens
from tierkv.engines.transformers.loading import join_rows
from tierkv.engines.transformers.reuse import Prefix, Request, reuse
from tierkv.engines.transformers.storing import BlockWriter
from tierkv.errors import InvalidRequest
from tierkv.insight.audit.served import Served
from tierkv.insight.usage import Usage, created_tokens_of
from tierkv.spec import KVSpec

if TYPE_CHECKING:
    from tierkv.insight.audit.transformers import Auditor

__all__ = ["Generation", "generate", "generate_batch"]

_ROOM_WAIT_S = 1.0

ExtraKeys = Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt produced and what it cost.

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
        Seconds from the call to the first generated token, everything included; in a batch also the prompts before.
    wait_s, load_s
        Of these, seconds spent waiting for loads from lower tiers and for others who computed the same prompt, and
        copying KV into the model's cache object.
    total_s
        Seconds from the call to its return.
    errors
        `TierKVError.slug` of each cache failure that was treated as a miss or as not stored.
    usage
        The same in the words of engines and providers.
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
    usage: Usage


def generate(
    model: PreTrainedModel,
    cache: Cache | None,
    spec: KVSpec,
    tokens: Sequence[int],
    max_new_tokens: int,
    *,
    chunk_tokens: int = 256,
    wait_s: float = 10.0,
    compute_s: float = 5.0,
    store_generated: bool = True,
    extra_keys: ExtraKeys | None = None,
    session: str = "",
    audit: Auditor | None = None,
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
        Longest wait, in seconds, for blocks that must be loaded first or that somebody else is computing. Storing waits
        for room no longer than this, and at most a second.
    compute_s
        As in `Cache.acquire`: of several requests with the same cold prompt one computes and the others wait for its
        blocks. One that publishes nothing for so many seconds is not waited for, so a chunk should take less. 0: nobody
        waits.
    store_generated
        Also store full blocks that reach into the answer, for the next turn of a conversation.
    extra_keys
        As in `tierkv.keys.chain_hashes`.
    session
        As in `Cache.acquire`.
    audit
        Who may compute a hit again and compare, once it has been answered: `tierkv.insight.audit.transformers.Auditor`.

    Notes
    -----
    Finished blocks are published on a second thread while the next chunk is computed; all are before the call returns.
    Raises `InvalidRequest` for impossible arguments, and no error of the cache.
    """
    return generate_batch(
        model,
        cache,
        spec,
        [tokens],
        max_new_tokens,
        chunk_tokens=chunk_tokens,
        wait_s=wait_s,
        compute_s=compute_s,
        store_generated=store_generated,
        extra_keys=[extra_keys],
        sessions=[session],
        audit=audit,
    )[0]


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    cache: Cache | None,
    spec: KVSpec,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk_tokens: int = 256,
    wait_s: float = 10.0,
    compute_s: float = 5.0,
    store_generated: bool = True,
    extra_keys: Sequence[ExtraKeys | None] | None = None,
    sessions: Sequence[str] | None = None,
    audit: Auditor | None = None,
) -> tuple[Generation, ...]:
    """Continue several prompts of any lengths greedily, each with what the cache has of it.

    Every prompt is prefilled by itself, in the order given, so that its blocks do not depend on its neighbours and a
    prefix that prompts share is computed once; then they are decoded together, padded on the left.

    Parameters
    ----------
    extra_keys, sessions
        One for each prompt, or None for none. Everything else as in `generate`.

    Returns
    -------
    tuple of Generation
        One for each prompt, in order.

    Notes
    -----
    A batch decodes the same matrices with a cache and without: its float32 tokens are those of the same batch without a
    cache. Those of one prompt alone can differ where two tokens are equally likely to the last bits.
    """
    started = time.perf_counter()
    if not prompts or not all(prompts) or max_new_tokens < 1 or chunk_tokens < 1 or chunk_tokens % spec.block_tokens:
        raise InvalidRequest(
            f"cannot generate {max_new_tokens} tokens from {[len(tokens) for tokens in prompts]} in steps of "
            f"{chunk_tokens}",
            remedy=f"pass tokens, ask for at least one, and step by a multiple of {spec.block_tokens}",
        )
    forward = Forward(model)
    if len(prompts) > 1:
        forward.require_positions()
    keys, names = extra_keys or [None] * len(prompts), sessions or [""] * len(prompts)
    with ExitStack() as stack:
        rows: list[_Row] = []
        audits_pause = stack.enter_context(ExitStack())
        if audit is not None:
            audits_pause.enter_context(audit.paused())
        for tokens, own_keys, session in zip(prompts, keys, names, strict=True):
            if rows:
                rows[-1].writer.settle()  # what the next prompt shares with this one is there when it asks
            request = Request(tokens, own_keys, session, wait_s, compute_s)
            prefix = reuse(model, cache, spec, request, len(tokens) + max_new_tokens)
            writer = BlockWriter(
                cache,
                spec,
                compute=prefix.compute,
                extra_keys=own_keys,
                session=session,
                wait_s=min(wait_s, _ROOM_WAIT_S),
            )
            row = _Row(stack.enter_context(writer), tokens, prefix)
            row.prefill(forward, chunk_tokens, spec.block_tokens, model.device)
            row.ttft_s = time.perf_counter() - started
            rows.append(row)
        audits_pause.close()
        _decode(model, forward, rows, max_new_tokens)
        if store_generated:
            for row in rows:
                row.store_answer(spec.block_tokens)
    total_s = time.perf_counter() - started
    if audit is not None:
        for row, own_keys in zip(rows, keys, strict=True):
            audit.offer(row.served(model, spec, own_keys, chunk_tokens, steady=not store_generated))
    return tuple(row.generation(spec.block_tokens, total_s) for row in rows)


class _Row:
    """One prompt on its way. Its KV is in row `number` of ``found.past``, after `padding`."""

    def __init__(self, writer: BlockWriter, tokens: Sequence[int], found: Prefix) -> None:
        self.writer = writer
        self.number, self.padding = 0, 0
        self.answer: list[int] = []
        self.ttft_s = 0.0
        self._tokens = tokens
        self._logits = torch.empty(0)
        self.found = found

    def prefill(self, forward: Forward, chunk_tokens: int, block_tokens: int, device: torch.device) -> None:
        """Compute what was not found, publishing it on the way, and the first token of the answer."""
        position, end = self.found.tokens, len(self._tokens)
        self.writer.begin(self._tokens, position // block_tokens, self.found.past)
        ids = torch.tensor([list(self._tokens)], device=device)
        while position < end:
            stop = min(end, (position // chunk_tokens + 1) * chunk_tokens)
            logits = forward(ids[:, position:stop], self.found.past)
            position = stop
            self.writer.advance(position)
        self.writer.end_prompt()
        self._logits = logits[0]
        self.answer = [int(self._logits.argmax())]

    def store_answer(self, block_tokens: int) -> None:
        """Publish the full blocks that reach into the answer, whose last token has no KV yet."""
        known = [*self._tokens, *self.answer[:-1]]
        start = len(self._tokens) // block_tokens
        self.writer.begin(known, start, self.found.past, row=self.number, padding=self.padding)
        self.writer.advance(len(known))

    def served(
        self, model: PreTrainedModel, spec: KVSpec, extra_keys: ExtraKeys | None, chunk_tokens: int, *, steady: bool
    ) -> Served:
        """Return what an auditor needs. The KV in it is this row's own memory, which nobody writes to any more."""
        return Served(
            model=model,
            spec=spec,
            tokens=self._tokens,
            extra_keys=extra_keys,
            reused_tokens=self.found.tokens,
            chunk_tokens=chunk_tokens,
            steady=steady,
            past=self.found.past,
            row=self.number,
            padding=self.padding,
            logits=self._logits,
        )

    def generation(self, block_tokens: int, total_s: float) -> Generation:
        found, prompt_tokens, stored = self.found, len(self._tokens), self.writer.stored
        usage = Usage(
            prompt_tokens,
            len(self.answer),
            found.tokens,
            created_tokens_of(stored, prompt_tokens, block_tokens),
            found.tokens_by_tier,
            found.saved_s,
        )
        return Generation(
            tokens=tuple(self.answer),
            prompt_tokens=prompt_tokens,
            reused_tokens=found.tokens,
            prefilled_tokens=prompt_tokens - found.tokens,
            tokens_by_tier=found.tokens_by_tier,
            stored_blocks=len(stored),
            ttft_s=self.ttft_s,
            wait_s=found.wait_s,
            load_s=found.load_s,
            total_s=total_s,
            errors=(*found.errors, *self.writer.errors),
            usage=usage,
        )


def _decode(model: PreTrainedModel, forward: Forward, rows: Sequence[_Row], max_new_tokens: int) -> None:
    """Append to the answers until each has ended. Mutates the rows, and where several are, moves their KV together."""
    ends = end_tokens(model)
    joined, past = None, rows[0].found.past
    if len(rows) > 1 and max_new_tokens > 1:
        joined = join_rows(model, [row.found.past for row in rows], room=max_new_tokens)
        past = joined.cache
        for number, row in enumerate(rows):
            row.found.past, row.number, row.padding = past, number, joined.padding[number]
    last = [row.answer[-1] for row in rows]
    while any(going := [len(row.answer) < max_new_tokens and row.answer[-1] not in ends for row in rows]):
        ids = torch.tensor(last, device=model.device).unsqueeze(1)
        if joined is None:
            logits = forward(ids, past)
        else:
            total = past.get_seq_length()
            logits = forward(ids, past, mask=joined.mask[:, : total + 1], positions=joined.positions(total))
        last = logits.argmax(-1).tolist()  # an answer that has ended goes on, unseen: the rows are one matrix
        for row, token, goes_on in zip(rows, last, going, strict=True):
            if goes_on:
                row.answer.append(token)
