"""The contract of the cache, the same embedded (`tierkv.open`) and through a daemon (`tierkv.connect`).

A prompt is a `Chain` of block hashes. A block is *published* once its bytes are written and verified: before that
nobody can hit it, afterwards everybody allowed can. Reading and writing happen in place, under leases:

    hit   = cache.lookup(chain)                      what is there, in which tier; changes nothing
    cache.read_into(chain, i, buffer)                one block, copied: the fastest read where the arena is mapped
    ticket = cache.prefetch(chain)                   start moving it towards the engine; does not wait
    with cache.acquire(chain, wait_s=1.0) as read:   pin the longest published prefix, wait for loads at most that long
        for ref in read.blocks:
            use(read.view(ref.index))                verified bytes, valid until the lease ends
    read.choice, read.compute                        why that much was loaded; who computes the rest
    with cache.reserve(chain, start=n) as write:     ask for room for the blocks that are missing
        for grant in write.granted:
            write.buffer(grant.index)[:] = ...
            write.commit([grant.index])              verify and publish, as early as each block is ready

Rules every implementation keeps: nothing is evicted, moved or overwritten under a lease; a lease ends by release, by
deadline or with its cache; a failed load, a failed write or a checksum mismatch removes the block and reads as a miss,
never as another block's bytes. All methods are safe to call from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tierkv.keys import chain_hashes, chain_root

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from tierkv.spec import KVSpec
    from tierkv.storage.device import DeviceBlock

__all__ = [
    "BlockRef",
    "Cache",
    "Chain",
    "ComputeLease",
    "Grant",
    "GrantState",
    "Hit",
    "LoadChoice",
    "Pinned",
    "ReadLease",
    "Ticket",
    "TicketProgress",
    "WriteLease",
    "Written",
]

GrantState = Literal["granted", "present", "busy", "no_room"]


@dataclass(frozen=True, slots=True)
class Chain:
    """The block hashes of one prompt in one namespace.

    Attributes
    ----------
    namespace
        `KVSpec.namespace`, 64 hex digits.
    hashes
        32-byte chain hashes of the prompt's full blocks, see `tierkv.keys`.
    """

    namespace: str
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, spec: KVSpec, tokens: ArrayLike, extra_keys: Mapping[int, bytes] | None = None) -> Chain:
        """Hash the full blocks of `tokens` (one-dimensional integers)."""
        fingerprint = spec.fingerprint
        return cls(
            fingerprint.hex(), tuple(chain_hashes(chain_root(fingerprint), tokens, spec.block_tokens, extra_keys or {}))
        )

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found.

    Attributes
    ----------
    blocks, tokens
        Length of the longest published prefix.
    tiers
        Per block of that prefix the tier that holds it; with several KV groups the slowest of theirs.
    """

    blocks: int
    tokens: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where one readable block lies: `length` bytes at `offset` of a tier's memory, and its XXH3-64."""

    index: int
    group: int
    tier: str
    offset: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a reservation of one block.

    Attributes
    ----------
    state
        ``granted``: write it at `offset` of `tier`'s memory. ``present``: somebody published it, skip it.
        ``busy``: somebody else is writing it, skip it. ``no_room``: everything is leased, go on without storing.
    """

    index: int
    group: int
    state: GrantState
    tier: str = ""
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """What a commit says of one block: its length in bytes and the XXH3-64 of what was written."""

    index: int
    group: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How far an acquire loaded, and why.

    Attributes
    ----------
    reason
        ``miss``: nothing is published. ``in_memory``: nothing had to be loaded. ``no_wait``: something had, but the
        caller does not wait. ``unknown_prefill``: all was loaded, as the engine's speed is unknown. ``unknown_rate``:
        from a tier of unknown speed, to find out. ``load``, ``partly``, ``recompute``: all, some or nothing was
        loaded, because computing the rest is faster. ``too_slow``: given up on the way, slower than it had looked.
    load_blocks
        Length of the prefix that was to be in memory.
    load_s, recompute_s
        Seconds that loading was expected to take, and seconds of computing it saves; 0 where unknown.
    """

    reason: str
    load_blocks: int
    load_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a pin holds: the first `blocks` of the chain, `nbytes` in all."""

    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TicketProgress:
    """How far a prefetch is; failed blocks count as done."""

    state: Literal["loading", "done", "cancelled"]
    blocks_total: int
    blocks_done: int
    bytes_total: int
    bytes_done: int


class Ticket(ABC):
    """A running prefetch."""

    id: str

    @abstractmethod
    def progress(self) -> TicketProgress:
        """Report progress. Does not wait."""

    @abstractmethod
    def wait(self, wait_s: float, *, groups: int | None = None) -> TicketProgress:
        """Wait until the prefetch is over, at most `wait_s` seconds.

        `groups`: only for the first so many KV groups (groups of layers), which are loaded in their order, so that an
        engine can begin with the first: ``acquire(..., groups=...)``.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Stop loads that nobody else wants and that have not begun. Idempotent."""


class ComputeLease(ABC):
    """The promise to compute blocks ``[start, stop)`` of a chain while others wait for them; `id` is its opaque name.

    Every commit of such a block is progress; without any for the `compute_s` it was granted with, the lease is somebody
    else's, and reservations of its blocks are over. It ends by itself when its last block is published. Losing it
    forbids nothing: what was computed may still be stored, under a new reservation.
    """

    id: str
    start: int
    stop: int

    @abstractmethod
    def renew(self, compute_s: float) -> None:
        """Promise progress within `compute_s` seconds from now, and so on after each. Raises `LeaseLost`."""

    @abstractmethod
    def release(self) -> None:
        """Give it up, so that somebody who waits can take over at once. Idempotent; never raises for a lost lease."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ReadLease(ABC):
    """Pins the blocks of a hit until released or expired; `id` is its opaque name.

    Attributes
    ----------
    blocks
        References to the pinned blocks, by index, then group.
    hit_blocks, hit_tokens, published_blocks
        Length of the pinned prefix, and of the longest that was published at the time of the call: longer when loads
        did not arrive in time or failed.
    tokens_by_tier
        `hit_tokens` by the tier that held each block when it was first asked for (a prefetched block still counts
        for the tier it was fetched from). The values sum to `hit_tokens`.
    missed_tokens
        Tokens asked for and not pinned, by reason: ``absent`` (never stored, as far as is known), ``evicted``,
        ``not_demoted_in_time``, ``deleted``, ``cleared``, ``corrupt``, ``late``, ``no_room``, ``failed``,
        ``cheaper_computed``. Never: that another tenant has them.
    saved_s, waited_s
        Seconds of prefill that the hit saves, less `waited_s` (0 while the engine's speed is unknown); seconds this
        call waited for loads and for others who compute.
    choice, compute, computed_elsewhere
        How far was loaded, and why; the lease to compute what is missing, if this caller asked and is the one; whether
        somebody else computes it.
    """

    id: str
    blocks: tuple[BlockRef, ...]
    hit_blocks: int
    hit_tokens: int
    published_blocks: int
    tokens_by_tier: Mapping[str, int]
    missed_tokens: Mapping[str, int]
    saved_s: float
    waited_s: float
    choice: LoadChoice
    compute: ComputeLease | None
    computed_elsewhere: bool

    @abstractmethod
    def view(self, index: int, group: int = 0) -> memoryview:
        """Return a block's bytes in place (a GPU's: copied), read-only, verified now, valid until the lease ends.

        Raises `CorruptBlock` when they do not match their checksum (the block is reported and removed) and
        `LeaseLost` after the lease's end.
        """

    @abstractmethod
    def device_view(self, index: int, group: int = 0) -> DeviceBlock | None:
        """Return where a block lies on the GPU, valid until the lease ends; None for one that does not.

        For caches opened with `on_device`. It was verified before it was copied there. Raises `LeaseLost`.
        """

    @abstractmethod
    def read_into(self, index: int, out: memoryview, group: int = 0) -> None:
        """Copy a block into `out`, then verify the copy. Errors as `view`; `BodyMismatch` when `out` is too small."""

    @abstractmethod
    def renew(self, ttl_s: float) -> None:
        """Move the deadline to `ttl_s` seconds from now. Raises `LeaseLost` if it has passed."""

    @abstractmethod
    def release(self) -> None:
        """End the lease. Idempotent; never raises for a lease that has expired."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WriteLease(ABC):
    """Room for blocks that are about to be written; `id` is its opaque name, `grants` has one answer per requested
    block and group, in order. Leaving the context aborts what was not committed.
    """

    id: str
    grants: tuple[Grant, ...]

    @property
    def granted(self) -> tuple[Grant, ...]:
        """The grants that may be written."""
        return tuple(g for g in self.grants if g.state == "granted")

    @abstractmethod
    def buffer(self, index: int, group: int = 0) -> memoryview:
        """Return the writable bytes of a granted block. Raises `LeaseLost` after the lease's end."""

    @abstractmethod
    def write(self, index: int, payload: bytes | bytearray | memoryview, group: int = 0) -> None:
        """Fill a granted block and sum it while it is still in the processor's cache: `commit` need not read it again.

        Views that `buffer` gave out before must not be written to any more: readers would find the block corrupt.
        Errors as `buffer`; `BodyMismatch` when `payload` is not the block's size.
        """

    @abstractmethod
    def commit(self, indices: Iterable[int] | None = None) -> int:
        """Checksum, verify and publish written blocks (all groups of each index; None: every one granted).

        All or nothing: a block that fails verification raises `ChecksumMismatch`, loses its slot, and nothing of this
        call is published. A block whose predecessor is not published yet becomes visible together with it. Returns
        the number of blocks accepted. Raises `LeaseLost` after the lease's end.
        """

    @abstractmethod
    def renew(self, ttl_s: float) -> None:
        """Move the deadline to `ttl_s` seconds from now. Raises `LeaseLost` if it has passed."""

    @abstractmethod
    def abort(self) -> None:
        """Give back every slot that was not committed. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Cache(ABC):
    """One tenant's view of a tiered cache."""

    @abstractmethod
    def register(self, spec: KVSpec) -> str:
        """Make a namespace known and return its name. Idempotent. Needed once per process before other calls."""

    @abstractmethod
    def lookup(self, chain: Chain, *, wait_s: float = 0.0) -> Hit:
        """Find the longest published prefix; ask other machines for `wait_s` seconds at most. No touch of policy."""

    @abstractmethod
    def prefetch(self, chain: Chain, *, deadline_s: float = 60.0) -> Ticket:
        """Start promoting the published prefix to the fastest tier; loads of one block are shared. Does not wait.

        `deadline_s`: in how many seconds the blocks are wanted. What is wanted first is loaded first, what an acquire
        waits for before that, and what has not begun by its deadline is given up.
        """

    @abstractmethod
    def acquire(
        self,
        chain: Chain,
        *,
        wait_s: float = 10.0,
        ttl_s: float = 30.0,
        max_blocks: int | None = None,
        compute_s: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        session: str = "",
        groups: tuple[int, ...] | None = None,
        handoff: bool = False,
    ) -> ReadLease:
        """Pin the longest published prefix in memory.

        Parameters
        ----------
        wait_s
            Seconds to wait for blocks that must be loaded, or that somebody else computes. 0: only what is in memory
            now. `math.inf`: all.
        ttl_s
            Seconds until the lease ends by itself.
        max_blocks
            Pin at most this many blocks (an engine must compute at least one token itself).
        compute_s
            Compute common prompts once: either wait for the request that computes what is missing, or, if there is
            none, get a `ComputeLease` that lasts for so many seconds from commit to commit. 0: compute unasked.
        prefill_tokens_per_s
            How fast the engine computes: no more is loaded than pays. None: what was learned from commits under compute
            leases of the namespace, and everything while nothing was.
        session
            The conversation this request belongs to, for `end_session` and `pause_session`. At most 128 characters.
        groups
            Pin only these KV groups; None: all.
        handoff
            Another engine prefills this prompt, here or on a machine that shares blocks: wait for what it publishes.
        """

    @abstractmethod
    def read_into(self, chain: Chain, index: int, out: memoryview, *, group: int = 0, wait_s: float = 0.0) -> bool:
        """Copy one published block into `out`, verified, without holding a lease; say whether it was there.

        A block of the warm tier that this process has mapped is found, copied and verified without asking anybody. Any
        other, and any doubt, takes the way of `acquire` with `wait_s`. False leaves garbage in `out`.
        Raises `BodyMismatch` when the block does not fit, `InvalidRequest` for an index outside the chain, and what
        `acquire` raises.
        """

    @abstractmethod
    def reserve(
        self,
        chain: Chain,
        *,
        start: int = 0,
        stop: int | None = None,
        wait_s: float = 1.0,
        ttl_s: float = 60.0,
        session: str = "",
    ) -> WriteLease:
        """Ask for room for blocks ``[start, stop)`` of all groups, evicting others if need be.

        Waits at most `wait_s` seconds for victims that must be written to a lower tier first; what finds no place is
        answered ``no_room``. `session` as in `acquire`.
        """

    @abstractmethod
    def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        """Keep the published prefix in memory for `ttl_s` seconds, loading what is not there. Does not wait.

        A pin of the same chain is replaced. A tenant can pin half of what it can count on in the warm tier; raises
        `LimitExceeded` beyond that.
        """

    @abstractmethod
    def unpin(self, chain: Chain) -> int:
        """End the pin of a chain; return how many blocks it held."""

    @abstractmethod
    def end_session(self, namespace: str, session: str) -> int:
        """Say that a conversation is over: the blocks that it alone has used are the next to leave memory.

        Returns how many. Only a hint: they are served as before until they have left. An unknown session has none.
        """

    @abstractmethod
    def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        """Say that a conversation goes on in `expected_s` seconds, after a tool call or a user's thought.

        For a short pause its blocks are held in memory; returns how many. After a long one, of more than a minute, they
        are prefetched shortly before it should end.
        """

    @abstractmethod
    def delete(self, chain: Chain) -> int:
        """Unpublish the last block of a chain in every tier and group; return how many were there."""

    @abstractmethod
    def clear(self, namespace: str) -> int:
        """Unpublish this tenant's blocks of a namespace in every tier; return how many."""

    @abstractmethod
    def flush(self) -> None:
        """Write everything that is only in memory to the lowest tier. Blocks until done."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and tier occupancy, as documented in docs/metrics.md."""

    @abstractmethod
    def close(self) -> None:
        """Embedded: flush and close the tiers. Connected: close the connection, release leases. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
