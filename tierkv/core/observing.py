"""What an observer of requests is told: enough to say why a prompt was not cached, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierkv.core.tenants import Tenant

if TYPE_CHECKING:
    from tierkv.core.state import NamespaceInfo

__all__ = ["Observer", "SeenRequest"]


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One acquire that was answered.

    Attributes
    ----------
    sequence
        Number of its event: what happened before has lower ones.
    at
        When it was answered, in seconds since the epoch.
    tenant, namespace, group
        Who asked, in which namespace, and the first KV group that was asked for.
    hashes
        Chain hashes of the blocks that were asked for, from the first.
    tiers
        Of each block served, the tier that held it when it was asked for.
    published
        Length of the published prefix; blocks between what was served and this were there, and not loaded.
    missed
        Blocks not served, by reason, see `tierkv.cache.ReadLease.missed_tokens`.
    lost
        The reason for which the first block that is not published is not; empty if all are.
    session
        The conversation it belongs to, if the caller said.
    waited_s, saved_s
        As in `tierkv.cache.ReadLease`.
    block_s
        Seconds the engine needs to compute one block, None if that is not known.
    tokens
        Token ids of the prompt, where the caller gave them and they may be kept; else None.
    """

    sequence: int
    at: float
    tenant: Tenant
    namespace: NamespaceInfo
    group: int
    hashes: Sequence[bytes]
    tiers: Sequence[str]
    published: int
    missed: Mapping[str, int]
    lost: str
    session: str
    waited_s: float
    saved_s: float
    block_s: float | None
    tokens: Sequence[int] | None

    def key(self, index: int) -> bytes:
        """Derive the storage key of a block, in its `group`."""
        return self.tenant.block_key(self.hashes[index], self.group)


class Observer(Protocol):
    """Somebody who wants to know of requests."""

    def acquired(self, seen: SeenRequest) -> None:
        """Note a request that was answered.

        Called on the request's own thread, without the engine's lock, before the caller has its answer: it returns in
        microseconds and waits for nothing. What it raises is logged and goes no further.
        """
