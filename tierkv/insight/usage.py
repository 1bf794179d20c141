"""What one request had from the cache and left in it, in the words of engines and providers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.insight.breakpoints import Breakpoint, created_for_an_hour, longest

if TYPE_CHECKING:
    from tierkv.cache import ReadLease, WriteLease

__all__ = ["Usage", "created_tokens_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes
    ----------
    prompt_tokens, completion_tokens
        Length of the prompt and of the answer.
    cached_tokens
        Tokens of the prompt whose KV came from the cache: its first ones.
    created_tokens
        Tokens of the prompt whose KV this request put into the cache. What it stores of its answer is not among them.
    cached_tokens_by_tier
        `cached_tokens` by the tier that held them when they were asked for; they sum to it.
    saved_s
        Seconds of prefill saved, less those spent waiting; 0 while the engine's speed is unknown.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    created_tokens: int = 0
    cached_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    saved_s: float = 0.0

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        block_tokens: int,
        read: ReadLease | None = None,
        write: WriteLease | None = None,
        *,
        completion_tokens: int = 0,
    ) -> Usage:
        """Take it from the leases of a request, which may have ended.

        `read`: of its acquire, all of which was used. `write`: of its reserve, if all that was granted was committed;
        else leave it out, and give `created_tokens` yourself (`created_tokens_of`).
        """
        created = {grant.index for grant in write.granted} if write is not None else ()
        return cls(
            prompt_tokens,
            completion_tokens,
            read.hit_tokens if read is not None else 0,
            created_tokens_of(created, prompt_tokens, block_tokens),
            dict(read.tokens_by_tier) if read is not None else {},
            read.saved_s if read is not None else 0.0,
        )

    def to_openai(self) -> dict[str, Any]:
        """Return the `usage` of OpenAI's chat completions; of its Responses API the same figures have other names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def to_anthropic(self, breakpoints: Iterable[Breakpoint] | None = None) -> dict[str, Any]:
        """Return the `usage` of Anthropic's Messages API; its three kinds of input sum to the prompt.

        `breakpoints`: those of the request; what was created behind the last one nobody has asked to keep, so that it
        is plain input. None: all that was created counts, as if the prompt ended with a breakpoint of 5m.
        """
        points = [Breakpoint(self.prompt_tokens)] if breakpoints is None else list(breakpoints)
        created = min(self.created_tokens, max(0, longest(points) - self.cached_tokens))
        hour = created_for_an_hour(points, self.cached_tokens, created)
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens - created,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": created,
            "cache_creation": {"ephemeral_5m_input_tokens": created - hour, "ephemeral_1h_input_tokens": hour},
            "output_tokens": self.completion_tokens,
        }


def created_tokens_of(blocks: Iterable[int], prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of the blocks with these indices that lie in the prompt; one that reaches into the answer does not."""
    return block_tokens * sum(1 for index in set(blocks) if (index + 1) * block_tokens <= prompt_tokens)
