"""The wire to the shared tier, and whether loading over it beats computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ByteSize, TypeAdapter, ValidationError

from tierkv.errors import ConfigError

__all__ = ["Link", "parse_bytes"]


@dataclass(frozen=True, slots=True)
class Link:
    """A node's way to the shared tier, the same in both directions.

    Attributes
    ----------
    bandwidth
        Bytes per second.
    latency
        Seconds before the first byte of a request's loads, the question what is there included.
    block_bytes
        Bytes of a block on the wire.
    prefill
        Tokens per second that a node computes instead.
    """

    bandwidth: float
    latency: float
    block_bytes: int
    prefill: float

    def seconds(self, blocks: int) -> float:
        """Time to load so many blocks for one request."""
        return self.latency + blocks * self.block_bytes / self.bandwidth if blocks else 0.0

    def paying(self, loaded: Sequence[bool], tokens: Sequence[int]) -> int:
        """Return after how many blocks to cut a prefix, so that loading before and computing behind takes least time.

        Of equal cuts it is the longest.

        Parameters
        ----------
        loaded
            For each block whether it has to be loaded; the others cost nothing.
        tokens
            How many tokens the first 1, 2, ... blocks have.
        """
        best, most_saved, loads = 0, 0.0, 0
        for depth, (load, upto) in enumerate(zip(loaded, tokens, strict=True)):
            loads += load
            saved = upto / self.prefill - self.seconds(loads)
            if saved >= most_saved:
                best, most_saved = depth + 1, saved
        return best

    def least_run(self, block_tokens: int) -> int | None:
        """Return from how many full blocks on loading beats computing; None if it never does."""
        gain = block_tokens / self.prefill - self.block_bytes / self.bandwidth
        if gain <= 0:
            return None
        return max(1, -int(-self.latency // gain))


def parse_bytes(text: str, what: str) -> int:
    """Read a size (`42MiB`), or a rate (`10Gbit`, meant for a second), in bytes. Raises `ConfigError` naming `what`."""
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise ConfigError(f"{what} cannot be {text!r}", remedy="write a number with a unit, such as 42MiB or 10Gbit")
    return size
