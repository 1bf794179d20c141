"""Leases: promises with a deadline. All access happens under the engine's lock."""

from __future__ import annotations

import heapq
import secrets
from dataclasses import dataclass, field

from tierkv.cache import BlockRef
from tierkv.core.index import Entry
from tierkv.errors import LeaseLost
from tierkv.storage.tier import BlockMeta, Slot

__all__ = ["Draft", "LeaseTable", "ReadRecord", "WriteRecord"]


@dataclass(slots=True, eq=False)
class ReadRecord:
    """Blocks pinned for one reader. `deadline` is on the monotonic clock (seconds)."""

    id: str
    tenant: bytes
    deadline: float
    entries: list[Entry]
    refs: tuple[BlockRef, ...]


@dataclass(slots=True, eq=False)
class Draft:
    """A block being written: its slot is private to the lease's holder until it is published.

    `written` is set once its bytes are verified and it only waits for its predecessor to be published.
    """

    index: int
    key: bytes
    meta: BlockMeta
    level: int
    slot: Slot
    written: bool = False


@dataclass(slots=True, eq=False)
class WriteRecord:
    """Drafts of one writer, and what it has published so far.

    Attributes
    ----------
    chain
        Published blocks the written ones follow.
    published
        Blocks of this lease that are published.
    closed
        The writer is done; only written blocks that wait for a predecessor keep the lease alive.
    """

    id: str
    tenant: bytes
    deadline: float
    drafts: dict[tuple[int, int], Draft]
    chain: list[Entry] = field(default_factory=list)
    published: list[Entry] = field(default_factory=list)
    closed: bool = False


class LeaseTable:
    """Live leases by id, with their deadlines."""

    def __init__(self) -> None:
        self._live: dict[str, ReadRecord | WriteRecord] = {}
        self._deadlines: list[tuple[float, str]] = []

    @staticmethod
    def new_id() -> str:
        """Return an id that nobody can guess."""
        return secrets.token_urlsafe(12)

    def add(self, lease: ReadRecord | WriteRecord) -> None:
        self._live[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))

    def find(self, lease_id: str, tenant: bytes) -> ReadRecord | WriteRecord:
        """Return a live lease of this tenant or raise `LeaseLost`."""
        lease = self._live.get(lease_id)
        if lease is None or lease.tenant != tenant:
            raise LeaseLost("the lease has expired, was released, or never existed", remedy="acquire or reserve again")
        return lease

    def renew(self, lease: ReadRecord | WriteRecord, deadline: float) -> None:
        lease.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, lease.id))

    def remove(self, lease: ReadRecord | WriteRecord) -> None:
        self._live.pop(lease.id, None)

    def expired(self, now: float) -> list[ReadRecord | WriteRecord]:
        """Remove and return every lease whose deadline has passed."""
        gone: list[ReadRecord | WriteRecord] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._live.get(lease_id)
            if lease is not None and lease.deadline <= now:
                del self._live[lease_id]
                gone.append(lease)
        return gone

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def counts(self) -> dict[str, int]:
        """Live leases by kind."""
        reads = sum(isinstance(lease, ReadRecord) for lease in self._live.values())
        return {"read": reads, "write": len(self._live) - reads}

    def drain(self) -> list[ReadRecord | WriteRecord]:
        """Remove and return every lease."""
        gone = list(self._live.values())
        self._live.clear()
        self._deadlines.clear()
        return gone
