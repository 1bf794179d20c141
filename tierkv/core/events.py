"""What happened lately, in order: for dashboards, routers and whoever mirrors the index.

Events are numbered without gaps. The latest are kept, so that a reader who was away for a moment misses nothing and one
who was away for long learns how many it missed. All access happens under the engine's lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

__all__ = ["Event", "EventKind", "EventLog"]

MOST_KEYS = 256

EventKind = Literal["stored", "promoted", "demoted", "evicted", "removed", "corrupt", "acquired", "expired"]


class Event(NamedTuple):
    """One thing that happened.

    Attributes
    ----------
    sequence
        Its number, from 1.
    at
        Seconds since the epoch.
    kind
        ``stored``: blocks were published. ``promoted``, ``demoted``: a tier got a copy. ``evicted``: a tier gave its
        copy up. ``removed``: blocks are published no more. ``corrupt``: a copy failed verification. ``acquired``: a
        request was answered. ``expired``: a lease ended by its deadline.
    tenant
        Id of the tenant it concerns.
    namespace
        Fingerprint; empty where it is about no block.
    keys
        Storage keys of the blocks.
    details
        What else there is to say, by kind; see docs/wire.md.
    """

    sequence: int
    at: float
    kind: EventKind
    tenant: bytes
    namespace: bytes
    keys: Sequence[bytes]
    details: Mapping[str, Any]


class EventLog:
    """The latest events.

    Parameters
    ----------
    most
        How many are kept; every key of an event counts as one more.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._size = 0
        self._events: deque[Event] = deque()
        self._waiting: list[Future[None]] = []
        self._read = 0
        self.last = 0

    def record(
        self, kind: EventKind, tenant: bytes, namespace: bytes, keys: Sequence[bytes], details: Mapping[str, Any]
    ) -> None:
        """Append an event and wake those who wait for one."""
        self.last += 1
        self._events.append(Event(self.last, time.time(), kind, tenant, namespace, keys, details))
        self._size += 1 + len(keys)
        while self._size > self._most:
            self._size -= 1 + len(self._events.popleft().keys)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for woken in waiting:
                if woken.set_running_or_notify_cancel():
                    woken.set_result(None)

    def add(self, kind: EventKind, tenant: bytes, namespace: bytes, key: bytes, details: Mapping[str, Any]) -> None:
        """Record what happened to one block: with the last event, if that says the same and nobody has read it yet."""
        last = self._events[-1] if self._events else None
        if (
            last is not None
            and last.sequence > self._read
            and (last.kind, last.tenant, last.namespace) == (kind, tenant, namespace)
            and last.details == details
            and isinstance(last.keys, list)
            and len(last.keys) < MOST_KEYS
        ):
            last.keys.append(key)
            self._size += 1
        else:
            self.record(kind, tenant, namespace, [key], details)

    def since(self, sequence: int, most: int) -> tuple[list[Event], int]:
        """Return events after `sequence`, at most so many, and how many before them are not kept any more."""
        oldest = self.last - len(self._events)
        missed = max(0, oldest - sequence)
        start = max(sequence, oldest) - oldest
        # By index, which a deque finds from its nearer end: whoever follows the log reads at its end.
        found = [self._events[at] for at in range(start, min(start + most, len(self._events)))]
        if found:
            self._read = max(self._read, found[-1].sequence)
        return found, missed

    def after(self, sequence: int) -> Future[None]:
        """Return a future that is done as soon as there is an event after `sequence`."""
        future: Future[None] = Future()
        if self.last > sequence:
            future.set_result(None)
        else:
            self._waiting = [waiting for waiting in self._waiting if not waiting.cancelled()]
            self._waiting.append(future)
        return future
