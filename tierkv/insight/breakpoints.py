"""Breakpoints as providers have them: prefixes that a caller marks, kept for a time class after their last use.

Anthropic's Messages API calls them `cache_control`: ``{"type": "ephemeral", "ttl": "5m"}`` on a part of the prompt.
Here a breakpoint is a length in tokens and one of those times. The daemon keeps them: ``POST
/v1/{namespace}/breakpoints``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tierkv.errors import InvalidRequest

__all__ = ["TTL_S", "Breakpoint", "TimeClass", "created_for_an_hour", "longest"]

TimeClass = Literal["5m", "1h"]
TTL_S: Mapping[TimeClass, float] = {"5m": 300.0, "1h": 3600.0}
"""Seconds from its last use for which a breakpoint's prefix is kept."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The first `tokens` tokens of a prompt are to be kept for `ttl` after their last use."""

    tokens: int
    ttl: TimeClass = "5m"

    @classmethod
    def of(cls, tokens: int, cache_control: Mapping[str, Any]) -> Breakpoint:
        """Read the `cache_control` of the part of a prompt that ends after `tokens` tokens. Raises `InvalidRequest`."""
        kind, ttl = cache_control.get("type"), cache_control.get("ttl", "5m")
        if kind != "ephemeral" or ttl not in TTL_S:
            raise InvalidRequest(
                f"cache_control cannot be {str(dict(cache_control))[:100]}",
                remedy='use {"type": "ephemeral"}, with "ttl": "5m" or "1h"',
            )
        return cls(tokens, ttl)

    def blocks(self, block_tokens: int) -> int:
        """How many whole blocks of `block_tokens` tokens it keeps."""
        return self.tokens // block_tokens


def longest(breakpoints: Iterable[Breakpoint]) -> int:
    """Tokens that some breakpoint keeps; 0 for none."""
    return max((point.tokens for point in breakpoints), default=0)


def created_for_an_hour(breakpoints: Iterable[Breakpoint], cached: int, created: int) -> int:
    """How many of the `created` tokens that follow `cached` are kept for an hour: those before a breakpoint of 1h."""
    return min(created, max(0, longest(point for point in breakpoints if point.ttl == "1h") - cached))
