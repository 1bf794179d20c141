"""What an analysis can be told."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import ConfigError

__all__ = ["BLOCK_TOKENS", "CacheOptions"]

BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's prefix cache on a GPU."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prefix cache a log is replayed through.

    Attributes
    ----------
    block_tokens
        Only whole blocks hit.
    capacity_tokens
        Evict the least recently used blocks beyond this; None: never evict.
    """

    block_tokens: int = BLOCK_TOKENS
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"blocks of {self.block_tokens} tokens", remedy="give --block-tokens at least 1")
        if self.capacity_tokens is not None and self.capacity_tokens < self.block_tokens:
            raise ConfigError(
                f"a cache of {self.capacity_tokens} tokens holds no block of {self.block_tokens}",
                remedy="give --capacity-tokens more, or leave it out",
            )

    @property
    def capacity_blocks(self) -> int | None:
        """The capacity in whole blocks."""
        return None if self.capacity_tokens is None else self.capacity_tokens // self.block_tokens
