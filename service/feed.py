"""Events as they leave the daemon: Server-Sent Events, in our own words or in those of vLLM's KV events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from tierkv.core.engine import Engine
from tierkv.core.events import Event
from tierkv.core.tenants import Tenant
from tierkv.storage.tier import NO_PARENT
from tierkv.wire import JSON_TYPE, encode

__all__ = ["FORMATS", "HEARTBEAT_S", "MISSED", "VLLM_KINDS", "Feed", "FeedFormat", "Selection"]

FeedFormat = Literal["tierkv", "vllm"]
FORMATS: tuple[FeedFormat, ...] = ("tierkv", "vllm")
MISSED = "missed"
"""Asks for those of the ``acquired`` events that missed something."""
VLLM_KINDS = frozenset({"stored", "promoted", "demoted", "evicted", "removed", "corrupt"})
"""The kinds that say where blocks are."""
HEARTBEAT_S = 15.0

_STATS_S = 1.0
_BATCH = 256
_CHUNK_BYTES = 64 << 10
_GATHER_S = 0.02
"""What follows an event within so many seconds is sent together with it."""
_MEDIA = {"hot": "GPU", "warm": "CPU", "cold": "DISK"}
"""By tier. What is in the shared tier only is everybody's, and not told."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events a reader gets, and how.

    Attributes
    ----------
    kinds
        Kinds of events, and `MISSED`.
    tenant
        Only this tenant's events; None: all.
    """

    kinds: frozenset[str]
    tenant: Tenant | None
    format: FeedFormat = "tierkv"

    def takes(self, event: Event) -> bool:
        """Say whether an event is one of those."""
        if self.tenant is not None and event.tenant != self.tenant.id:
            return False
        return event.kind in self.kinds or (
            MISSED in self.kinds and event.kind == "acquired" and bool(event.details["missed_blocks"])
        )


class Feed:
    """The events of one reader.

    Parameters
    ----------
    generation
        This run of the daemon; part of every event's id, so that a reader that comes back after a restart is told.
    start
        Number of the last event that the reader has.
    restarted
        The reader has seen an earlier run: nobody knows how many events it missed.
    stats
        Called once a second for a ``stats`` event; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        generation: str,
        selection: Selection,
        start: int,
        *,
        restarted: bool,
        stats: Callable[[], Mapping[str, Any]] | None,
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._selection = selection
        self._at = start
        self._restarted = restarted
        self._stats = stats

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what to send next, for ever. What has not been asked for is not kept: a slow reader misses events."""
        yield b"retry: 2000\n" + self._position()
        if self._restarted:
            yield _message("gap", {"missed": None})
        written = time.monotonic()
        stats_due = written
        while True:
            events, missed = self._engine.events_since(self._at, _BATCH)
            ready = bytearray(_message("gap", {"missed": missed}) if missed else b"")
            for event in events:
                if self._selection.takes(event):
                    ready += b"".join(self._messages(event))
                if len(ready) >= _CHUNK_BYTES:
                    yield bytes(ready)
                    ready.clear()
            self._at = events[-1].sequence if events else self._at + missed
            now = time.monotonic()
            if self._stats is not None and now >= stats_due:
                stats_due = max(stats_due + _STATS_S, now)
                ready += _message("stats", self._stats())
            if not ready and now >= written + HEARTBEAT_S:
                ready += b": still here\n" + self._position()
            if ready:
                written = now
                yield bytes(ready)
            if len(events) < _BATCH:
                due = written + HEARTBEAT_S if self._stats is None else stats_due
                await self._next(max(0.0, due - time.monotonic()))
            else:
                await asyncio.sleep(0)

    async def _next(self, timeout_s: float) -> None:
        """Wait for an event."""
        arrival = asyncio.wrap_future(self._engine.next_event(self._at))
        with suppress(TimeoutError):
            await asyncio.wait_for(arrival, timeout_s)
            await asyncio.sleep(_GATHER_S)

    def _messages(self, event: Event) -> Iterator[bytes]:
        if self._selection.format == "vllm":
            found = list(_vllm(event, self._block_tokens(event.namespace)))
            for data in found:
                # Only the last carries the id: a reader that lost the connection before it gets all of them again.
                yield _message(data["type"], data, self._id(event.sequence) if data is found[-1] else "")
            return
        tenant = self._engine.tenant_of(event.tenant)
        data = {
            "at": event.at,
            "kind": event.kind,
            "tenant": tenant.name if tenant is not None else None,
            "namespace": event.namespace,
            "keys": event.keys,
            "details": event.details,
        }
        yield _message(event.kind, data, self._id(event.sequence))

    def _block_tokens(self, namespace: bytes) -> int:
        """Tokens per block; 0 in a namespace that was not registered since the start."""
        info = self._engine.namespace_of(namespace)
        return info.spec.block_tokens if info is not None else 0

    def _id(self, sequence: int) -> str:
        return f"{self._generation}-{sequence}"

    def _position(self) -> bytes:
        """Tell the reader how far it is, without an event."""
        return f"id: {self._id(self._at)}\n\n".encode()


def _message(kind: str, data: Mapping[str, Any], name: str = "") -> bytes:
    head = f"id: {name}\nevent: {kind}\ndata: " if name else f"event: {kind}\ndata: "
    return head.encode() + encode(data, JSON_TYPE) + b"\n\n"


def _vllm(event: Event, block_tokens: int) -> Iterator[dict[str, Any]]:
    """Say where blocks have come and gone; see docs/wire.md."""
    details = event.details
    if event.kind == "stored":
        yield from _stored(event, block_tokens)
    elif event.kind in ("promoted", "demoted"):
        target = details["move"].rpartition(">")[2]
        yield _block_stored(event.at, event.keys, details["parent"], block_tokens, target)
    elif event.kind == "removed" or details["tier"] in _MEDIA:
        medium = None if event.kind == "removed" else _MEDIA[details["tier"]]
        yield {"type": "BlockRemoved", "ts": event.at, "block_hashes": event.keys, "medium": medium}


def _stored(event: Event, block_tokens: int) -> Iterator[dict[str, Any]]:
    """A commit's blocks, split into runs in which each follows the one before it."""
    parents, tiers, keys = event.details["parents"], event.details["tiers"], event.keys
    start = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or parents[at] != keys[at - 1] or tiers[at] != tiers[start]:
            yield _block_stored(event.at, keys[start:at], parents[start], block_tokens, tiers[start])
            start = at


def _block_stored(at: float, keys: Any, parent: bytes, block_tokens: int, tier: str) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "ts": at,
        "block_hashes": keys,
        "parent_block_hash": parent if parent != NO_PARENT else None,
        "block_size": block_tokens,
        "medium": _MEDIA[tier],
    }
