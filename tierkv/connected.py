"""What a cache through a daemon can do besides what every cache can: say which daemons hold a prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tierkv.cache import Cache, Chain

__all__ = ["ConnectedCache", "NodeFailure", "NodeHit", "Where"]

NodeFailure = Literal["down", "late", "refused", "unknown-namespace"]


@dataclass(frozen=True, slots=True)
class NodeHit:
    """What one daemon holds of a prefix, or why it does not say.

    Attributes
    ----------
    node
        Its name; None for one that was never heard of.
    url
        Where it was asked; None for the daemon that this cache is connected to.
    blocks, tokens, tokens_by_tier
        Length of the longest prefix it has published, in blocks and tokens, and these by tier. Of ``shared`` all have
        as much.
    error, detail
        None, and empty, for one that answered. ``down``: not reached, or failing. ``late``. ``refused``: it does not
        take this node's word, mostly because its secret is another one. ``unknown-namespace``: nobody registered it
        there yet.
    age_s
        Seconds since it last answered; None for never.
    """

    node: str | None
    url: str | None
    blocks: int
    tokens: int
    tokens_by_tier: Mapping[str, int]
    error: NodeFailure | None
    detail: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Where:
    """Which daemons hold how much of a chain of `blocks` blocks, when they were asked. It pins nothing.

    `nodes`: those that hold most themselves, not in the shared tier, first; those that did not say last.
    """

    blocks: int
    nodes: tuple[NodeHit, ...]


class ConnectedCache(Cache):
    """One tenant's view of a daemon's cache, as `tierkv.connect` returns it."""

    @abstractmethod
    def where(self, chain: Chain, *, wait_s: float = 0.05) -> Where:
        """Ask the daemon, and all those that it knows, what they have published of a chain. Blocks; changes nothing.

        Returns when all have answered, after `wait_s` seconds at the latest: whoever is down or late is said to be.
        """
