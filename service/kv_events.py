"""vLLM's KV events over ZeroMQ: which blocks come and go, for routers that send requests where their prefix is.

The form is that of vLLM's own publisher: topic, sequence number, and a batch of `BlockStored`, `BlockRemoved` and
`AllBlocksCleared`; what was missed can be asked for again. Blocks are named by their chain hashes: an engine's own ones
as `tierkv.keys.adopt_chain` brings them into the namespace. Storage keys are a tenant's secret and stay inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from tierkv.config import KVEventsConfig
from tierkv.core.engine import Engine
from tierkv.core.events import Event
from tierkv.errors import ConfigError, DependencyMissing
from tierkv.storage.tier import NO_PARENT

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

__all__ = ["Mirror", "publishing"]

log = logging.getLogger(__name__)

_BATCH = 256
_GATHER_S = 0.02
"""What follows an event within so many seconds is sent together with it."""
_REPLAY_BATCHES, _REPLAY_BYTES = 10_000, 32 << 20
_WAITING_BATCHES = 10_000
"""For a subscriber that does not keep up; what goes beyond it misses, and can see that by the sequence numbers."""
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIA = {"hot": "GPU", "warm": "CPU", "cold": "STORAGE"}
"""By tier. What is in the shared tier only is everybody's, and not told."""
_BITS = {medium: 1 << place for place, medium in enumerate(_MEDIA.values())}
_LOOPBACK = ("127.0.0.1", "[::1]")

Told = dict[str, Any]


class Mirror:
    """What subscribers have been told: turns our events into vLLM's.

    Keeps each block's chain hash, KV group and media under its storage key: about 200 bytes a block.

    Parameters
    ----------
    block_tokens
        Says how many tokens a block of a namespace (by fingerprint) has.
    """

    def __init__(self, block_tokens: Callable[[bytes], int]) -> None:
        self._block_tokens = block_tokens
        self._known: dict[bytes, bytes] = {}  # media as bits, group as 2 bytes, chain hash

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> Told:
        """Forget everything; return what tells subscribers to do so too."""
        self._known.clear()
        return {"type": "AllBlocksCleared"}

    def tell(self, event: Event) -> Iterator[Told]:
        """Yield what an event means to a subscriber. Blocks that were stored before this run of the daemon are unknown
        here, as they are to subscribers, until they are stored anew."""
        if event.kind == "stored":
            yield from self._stored(event)
        elif event.kind in ("promoted", "demoted"):
            medium = _MEDIA.get(event.details["move"].rpartition(">")[2])
            if medium is None:
                return
            parent = self._hash(event.details["parent"])
            for key in event.keys:  # each follows the same parent: siblings, not a run
                known = self._known.get(key)
                if known is not None:
                    self._arrived(key, known, medium)
                    yield self._block_stored(event, [known[3:]], parent, medium, _group(known))
        elif event.kind in ("evicted", "corrupt"):
            medium = _MEDIA.get(event.details["tier"])
            yield from self._left(event.keys, () if medium is None else (medium,))
        elif event.kind == "removed":
            yield from self._left(event.keys, _BITS)

    def _stored(self, event: Event) -> Iterator[Told]:
        """Tell of a commit's blocks in runs in which each follows the one before it."""
        keys, details = event.keys, event.details
        for group in sorted(set(details["groups"])):
            run: list[bytes] = []
            parent, before, tier = NO_PARENT, b"", ""
            for at, key in enumerate(keys):
                if details["groups"][at] != group:
                    continue
                if run and (details["parents"][at] != before or details["tiers"][at] != tier):
                    yield self._block_stored(event, run, self._hash(parent), _MEDIA[tier], group)
                    run = []
                if not run:
                    parent, tier = details["parents"][at], details["tiers"][at]
                run.append(details["hashes"][at])
                before = key
                self._arrived(key, b"\0" + group.to_bytes(2, "little") + details["hashes"][at], _MEDIA[tier])
            yield self._block_stored(event, run, self._hash(parent), _MEDIA[tier], group)

    def _arrived(self, key: bytes, known: bytes, medium: str) -> None:
        self._known[key] = bytes((known[0] | _BITS[medium],)) + known[1:]

    def _left(self, keys: Iterable[bytes], media: Iterable[str]) -> Iterator[Told]:
        """Tell that media do not have blocks any more, of those that had them."""
        gone: dict[tuple[str, int], list[bytes]] = {}
        for key in keys:
            known = self._known.get(key)
            if known is None:
                continue
            left = known[0]
            for medium in media:
                if left & _BITS[medium]:
                    left &= ~_BITS[medium]
                    gone.setdefault((medium, _group(known)), []).append(known[3:])
            if left:
                self._known[key] = bytes((left,)) + known[1:]
            else:
                del self._known[key]
        for (medium, group), hashes in gone.items():
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}

    def _hash(self, key: bytes) -> bytes | None:
        known = self._known.get(key)
        return None if known is None else known[3:]

    def _block_stored(
        self, event: Event, hashes: Sequence[bytes], parent: bytes | None, medium: str, group: int
    ) -> Told:
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": [],
            "block_size": self._block_tokens(event.namespace),
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "group_idx": group,
        }


@contextlib.asynccontextmanager
async def publishing(settings: KVEventsConfig, engine: Engine) -> AsyncIterator[None]:
    """Publish an engine's events while inside; nothing, where `settings` has no endpoint.

    Raises `DependencyMissing` without pyzmq, and `ConfigError` for an endpoint that cannot be had.
    """
    if settings.endpoint is None:
        yield
        return
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise DependencyMissing("kv_events needs pyzmq", remedy="pip install 'tierkv-cache[events]'") from None
    context = zmq.asyncio.Context()
    tasks: list[asyncio.Task[None]] = []
    try:
        publisher = _Publisher(engine, settings.topic, _socket(context, zmq.PUB, settings.endpoint, _WAITING_BATCHES))
        tasks.append(asyncio.create_task(publisher.publish()))
        if settings.replay is not None:
            replay = _socket(context, zmq.ROUTER, settings.replay, _REPLAY_BATCHES + 1)
            tasks.append(asyncio.create_task(publisher.replay(replay)))
        for task in tasks:
            task.add_done_callback(_report)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


class _Publisher:
    """Follows an engine's events and sends them; keeps the latest batches for those who missed them."""

    def __init__(self, engine: Engine, topic: str, socket: zmq.asyncio.Socket) -> None:
        self._engine = engine
        self._topic = topic.encode()
        self._socket = socket
        self._mirror = Mirror(self._block_tokens)
        self._at = 0
        self._sent = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0

    async def publish(self) -> None:
        """Send events as they happen, for ever. Begins with `AllBlocksCleared`: what an earlier run told is over."""
        told: list[Told] = [self._mirror.clear()]
        while True:
            events, missed = self._engine.events_since(self._at, _BATCH)
            if missed:  # what has left meanwhile is not known: better none than wrong ones
                log.warning("kv events fell behind: subscribers start over", extra={"missed": missed})
                told.append(self._mirror.clear())
            for event in events:
                told += self._mirror.tell(event)
            self._at = events[-1].sequence if events else self._at + missed
            if told:
                await self._send(told, events[-1].at if events else time.time())
                told = []
            if len(events) < _BATCH:
                await asyncio.wrap_future(self._engine.next_event(self._at))
                await asyncio.sleep(_GATHER_S)
            else:
                await asyncio.sleep(0)

    async def replay(self, router: zmq.asyncio.Socket) -> None:
        """Answer requests for what was missed, for ever."""
        while True:
            request = await router.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue
            client, _, start = request
            for sequence, payload in [kept for kept in self._kept if kept[0] >= start]:
                await router.send_multipart((client, b"", self._topic, sequence, payload))
            await router.send_multipart((client, b"", b"", _END, b""))

    async def _send(self, told: list[Told], at: float) -> None:
        sequence, payload = self._sent.to_bytes(8, "big"), msgpack.packb([at, told, 0])
        self._sent += 1
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _REPLAY_BATCHES or (self._kept_bytes > _REPLAY_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        await self._socket.send_multipart((self._topic, sequence, payload))

    def _block_tokens(self, namespace: bytes) -> int:
        """Tokens per block; 0 in a namespace that was not registered since the start."""
        info = self._engine.namespace_of(namespace)
        return info.spec.block_tokens if info is not None else 0


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str, most: int) -> zmq.asyncio.Socket:
    """Listen at an endpoint; a Unix socket is for its owner only."""
    import zmq

    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, most)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    mask = os.umask(0o177)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events: cannot listen at {endpoint}: {error.strerror}",
            remedy="use a free port of an address of this machine, or a path in an existing directory",
        ) from None
    finally:
        os.umask(mask)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if endpoint.startswith("tcp://") and endpoint[6:].rpartition(":")[0] not in _LOOPBACK:
        log.warning("whoever reaches this sees what all tenants have cached, unencrypted", extra={"address": bound})
    log.info("kv events", extra={"address": bound, "socket": "PUB" if kind == zmq.PUB else "ROUTER"})
    return socket


def _group(known: bytes) -> int:
    return int.from_bytes(known[1:3], "little")


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("kv events have ended unexpectedly", exc_info=task.exception())
