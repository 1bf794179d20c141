"""Which tokens of a trace are read from a cache, written to it, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.insight.cost.prices import GPUPlan, TokenPlan
from tierkv.insight.cost.traffic import Traffic
from tierkv.policy import make_policy
from tierkv.replay.single import replay
from tierkv.replay.trace import Request, Trace

__all__ = ["Usage", "own_usage", "provider_usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by what is paid for them.

    Attributes
    ----------
    read, written
        Prompt tokens found in the cache, and written to it.
    plain
        Other prompt tokens.
    output
        Tokens of answers.
    """

    read: int
    written: int
    plain: int
    output: int

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.read + self.written + self.plain


def provider_usage(traffic: Traffic, plan: TokenPlan) -> Usage:
    """Follow a provider's cache over a trace.

    An entry lives for `ttl` after it was written or read last; at that very moment it is gone. It can be read as soon
    as it was asked to be written. Only whole blocks of the trace are cached, so the rest of a prompt is plain input.
    """
    trace, output = traffic.trace, sum(traffic.answers)
    if plan.cached_input is None or plan.ttl is None:
        return Usage(0, 0, trace.prompt_tokens(), output)
    cache = _Entries(plan.ttl * 1000, whole_prompts=plan.breakpoints == "prompt")
    read = written = 0
    for request in trace.requests:
        blocks = _cacheable(trace, request, plan.minimum_tokens)
        run = cache.find(blocks, request.timestamp)
        if run * trace.block_tokens < plan.minimum_tokens:
            run = 0
        cache.use(blocks, run, request.timestamp)
        read += run * trace.block_tokens
        written += (len(blocks) - run) * trace.block_tokens
    return Usage(read, written, trace.prompt_tokens() - read - written, output)


def own_usage(traffic: Traffic, plan: GPUPlan) -> Usage:
    """Replay a cache of one's own over a trace. Raises `ConfigError` for one without room for a block."""
    trace, output = traffic.trace, sum(traffic.answers)
    if plan.memory is None:
        return Usage(0, 0, trace.prompt_tokens(), output)
    capacity = plan.memory // (plan.bytes_per_token * trace.block_tokens)
    if capacity < 1:
        raise ConfigError(
            f"memory of {plan.memory:,} bytes has no room for a block of {trace.block_tokens} tokens",
            remedy="raise memory in the price list, or correct bytes_per_token",
        )
    read = replay(trace, make_policy(plan.policy, capacity), capacity)
    return Usage(read, 0, trace.prompt_tokens() - read, output)


def _cacheable(trace: Trace, request: Request, minimum_tokens: int) -> tuple[int, ...]:
    """Return the full blocks of a prompt, none of one that is too short."""
    full = request.tokens // trace.block_tokens
    return request.blocks[:full] if full * trace.block_tokens >= minimum_tokens else ()


class _Entries:
    """What a provider holds: prefixes, by the last block of each, and when they expire.

    Parameters
    ----------
    ttl_ms
        How long an entry lives.
    whole_prompts
        Only the ends of prompts are entries, not every block.
    """

    def __init__(self, ttl_ms: float, *, whole_prompts: bool) -> None:
        self._ttl = ttl_ms
        self._whole_prompts = whole_prompts
        self._expires: dict[int, float] = {}

    def find(self, blocks: tuple[int, ...], now: float) -> int:
        """Return the length in blocks of the longest prefix that is held."""
        if self._whole_prompts:
            depths: Iterable[int] = range(len(blocks), 0, -1)
            return next((depth for depth in depths if self._alive(blocks[depth - 1], now)), 0)
        run = 0
        while run < len(blocks) and self._alive(blocks[run], now):
            run += 1
        return run

    def use(self, blocks: tuple[int, ...], run: int, now: float) -> None:
        """Renew the prefix of `run` blocks that was read, and write the rest."""
        used = {run, len(blocks)} - {0} if self._whole_prompts else range(1, len(blocks) + 1)
        for depth in used:
            self._expires[blocks[depth - 1]] = now + self._ttl

    def _alive(self, block: int, now: float) -> bool:
        return self._expires.get(block, float("-inf")) > now
