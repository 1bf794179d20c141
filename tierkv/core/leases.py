"""Leases: promises with a deadline. All access happens under the engine's lock."""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from tierkv.cache import BlockRef
from tierkv.core.index import Entry
from tierkv.core.sessions import Session
from tierkv.errors import LeaseLost
from tierkv.storage.tier import BlockMeta, Slot

if TYPE_CHECKING:
    from tierkv.core.sharing.following import Claim

__all__ = ["ComputeRecord", "Draft", "Lease", "LeaseKind", "LeaseTable", "PinRecord", "ReadRecord", "WriteRecord"]

LeaseKind = Literal["read", "write", "compute", "pin"]


@dataclass(slots=True, eq=False)
class ReadRecord:
    """Blocks pinned for one reader. `deadline` is on the monotonic clock (seconds)."""

    kind: ClassVar[LeaseKind] = "read"
    id: str
    tenant: bytes
    deadline: float
    entries: list[Entry]
    refs: tuple[BlockRef, ...]


@dataclass(slots=True, eq=False)
class PinRecord:
    """Blocks kept in memory for a while, for nobody in particular.

    Attributes
    ----------
    nbytes
        Size of the blocks in all.
    name
        What it is found again by.
    ttl_s, mark
        Of a breakpoint: seconds that each hit renews it for, and the namespace and chain hash of the block whose hit
        does; None for a pin that nothing renews.
    chain
        What was asked to be pinned, namespace and chain hashes; None where that is somebody's session.
    """

    kind: ClassVar[LeaseKind] = "pin"
    id: str
    tenant: bytes
    deadline: float
    entries: list[Entry]
    nbytes: int
    name: object
    ttl_s: float = 0.0
    mark: tuple[str, bytes] | None = None
    chain: tuple[str, Sequence[bytes]] | None = None


@dataclass(slots=True, eq=False)
class ComputeRecord:
    """Somebody prefills blocks ``[start, stop)`` of a chain, so that others need not.

    Attributes
    ----------
    deadline
        Of the next progress, `ttl_s` seconds after the last (monotonic seconds).
    namespace
        Name of the namespace.
    keys
        Storage key -> index of every block it stands for.
    left
        Index -> how many of its blocks (one per KV group) are not published yet; indices that are done are gone.
    progressed
        When it was granted, or last published something.
    burst_since, burst_blocks
        When those blocks were begun that were published since the last pause, and how many they are.
    waiting
        Those who wait for a block: its index, and what to complete.
    claim
        What other machines were told, if there are any.
    """

    kind: ClassVar[LeaseKind] = "compute"
    id: str
    tenant: bytes
    deadline: float
    ttl_s: float
    namespace: str
    start: int
    stop: int
    keys: dict[bytes, int]
    left: dict[int, int]
    progressed: float
    burst_since: float
    burst_blocks: int = 0
    waiting: list[tuple[int, Future[None]]] = field(default_factory=list)
    claim: Claim | None = None


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
    hashes
        Chain hashes of the whole chain.
    chain
        Published blocks the written ones follow.
    published
        Blocks of this lease that are published.
    session
        The session it writes for.
    closed
        The writer is done; only written blocks that wait for a predecessor keep the lease alive.
    """

    kind: ClassVar[LeaseKind] = "write"
    id: str
    tenant: bytes
    deadline: float
    hashes: Sequence[bytes]
    drafts: dict[tuple[int, int], Draft]
    chain: list[Entry] = field(default_factory=list)
    published: list[Entry] = field(default_factory=list)
    session: Session | None = None
    closed: bool = False


Lease = ReadRecord | WriteRecord | ComputeRecord | PinRecord


class LeaseTable:
    """Live leases by id, with their deadlines.

    Attributes
    ----------
    on_earlier
        Called when a deadline has become the next.
    """

    def __init__(self) -> None:
        self.on_earlier: Callable[[], None] = lambda: None
        self._live: dict[str, Lease] = {}
        self._held: Counter[bytes] = Counter()
        self._deadlines: list[tuple[float, str]] = []

    @staticmethod
    def new_id() -> str:
        """Return an id that nobody can guess."""
        return secrets.token_urlsafe(12)

    def add(self, lease: Lease) -> None:
        self._live[lease.id] = lease
        self._held[lease.tenant] += 1
        self._due(lease.deadline, lease.id)

    def find(self, lease_id: str, tenant: bytes) -> Lease:
        """Return a live lease of this tenant or raise `LeaseLost`."""
        lease = self._live.get(lease_id)
        if lease is None or lease.tenant != tenant:
            raise LeaseLost("the lease has expired, was released, or never existed", remedy="acquire or reserve again")
        return lease

    def renew(self, lease: Lease, deadline: float) -> None:
        if deadline < lease.deadline:  # else it is found again when its old deadline has passed
            self._due(deadline, lease.id)
        lease.deadline = deadline

    def remove(self, lease: Lease) -> None:
        if self._live.pop(lease.id, None) is not None:
            self._held[lease.tenant] -= 1
            if not self._held[lease.tenant]:
                del self._held[lease.tenant]

    def expired(self, now: float) -> list[Lease]:
        """Remove and return every lease whose deadline has passed."""
        gone: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._live.get(lease_id)
            if lease is None:
                continue
            if lease.deadline <= now:
                self.remove(lease)
                gone.append(lease)
            else:
                heapq.heappush(self._deadlines, (lease.deadline, lease_id))
        return gone

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def counts(self) -> dict[str, int]:
        """Live leases by kind."""
        found = Counter(lease.kind for lease in self._live.values())
        return {kind: found[kind] for kind in get_args(LeaseKind)}

    def writing(self, keys: Container[bytes]) -> list[WriteRecord]:
        """Return the write leases under which one of these blocks is being written."""
        writers = [lease for lease in self._live.values() if isinstance(lease, WriteRecord)]
        return [lease for lease in writers if any(d.key in keys and not d.written for d in lease.drafts.values())]

    def held(self, tenant: bytes) -> int:
        """How many live leases a tenant has."""
        return self._held[tenant]

    def _due(self, deadline: float, lease_id: str) -> None:
        heapq.heappush(self._deadlines, (deadline, lease_id))
        if self._deadlines[0][1] == lease_id:
            self.on_earlier()

    def drain(self) -> list[Lease]:
        """Remove and return every lease."""
        gone = list(self._live.values())
        self._live.clear()
        self._held.clear()
        self._deadlines.clear()
        return gone
