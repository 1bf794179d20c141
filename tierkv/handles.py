"""Leases as callers hold them: the same behaviour over an embedded cache, shared memory and HTTP bodies.

What differs between those is a `Plane`: where a block's bytes are, and how the other side is told. Verification, local
deadlines and the order of things are here, once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from tierkv.cache import (
    BlockRef,
    Cache,
    Chain,
    ComputeLease,
    Grant,
    LoadChoice,
    ReadLease,
    WriteLease,
    Written,
)
from tierkv.copying import copy_and_sum
from tierkv.errors import BodyMismatch, CorruptBlock, InvalidRequest, LeaseLost
from tierkv.storage.device import DeviceBlock

Buffer = bytes | bytearray | memoryview

__all__ = ["LeaseHandle", "LeasedComputer", "LeasedReader", "LeasedWriter", "Plane", "read_leased", "take_over"]


@dataclass(frozen=True, slots=True)
class LeaseHandle:
    """A read lease on its way to another holder, in this process or in another of the same tenant.

    Attributes
    ----------
    id
        The lease's name.
    blocks
        The pinned blocks.
    generation
        The run of the daemon whose memory `blocks` point into; empty when they are fetched by name.
    deadline
        When the lease ends, on this machine's monotonic clock (seconds).
    """

    id: str
    blocks: tuple[BlockRef, ...]
    generation: str
    deadline: float


class Plane(Protocol):
    """How a lease reaches its bytes and its owner.

    Attributes
    ----------
    generation
        The run of the daemon whose memory it has mapped, empty where there is none.
    """

    generation: str

    def view(self, block: BlockRef | Grant) -> memoryview:
        """Return a block's memory: readable, and writable for a grant. Of a block on a device a copy of it."""

    def device_view(self, block: BlockRef) -> DeviceBlock | None:
        """Return where a block lies on a device, None for one that does not."""

    def commit(self, lease_id: str, written: Sequence[Written]) -> int:
        """Publish written blocks."""

    def abort(self, lease_id: str) -> None:
        """End a write lease."""

    def release(self, lease_id: str, corrupt: Sequence[tuple[int, int]]) -> None:
        """End a read lease, naming blocks (index, group) that failed verification."""

    def renew(self, lease_id: str, ttl_s: float) -> float:
        """Move a lease's deadline; return the seconds granted, which may be fewer."""


class LeasedReader(ReadLease):
    """A `ReadLease` over a plane. `asked` is the monotonic time before the request: the local deadline counts from it,
    so that it never ends later than the owner's. An empty `lease_id` is a lease on
    nothing, which the owner does not know."""

    def __init__(
        self,
        plane: Plane,
        lease_id: str,
        blocks: Iterable[BlockRef],
        *,
        hit_blocks: int,
        hit_tokens: int,
        published_blocks: int,
        tokens_by_tier: Mapping[str, int],
        missed_tokens: Mapping[str, int],
        saved_s: float,
        waited_s: float,
        choice: LoadChoice,
        compute: ComputeLease | None,
        computed_elsewhere: bool,
        deadline: float,
    ) -> None:
        self.id = lease_id
        self.blocks = tuple(blocks)
        self.hit_blocks = hit_blocks
        self.hit_tokens = hit_tokens
        self.published_blocks = published_blocks
        self.tokens_by_tier = tokens_by_tier
        self.missed_tokens = missed_tokens
        self.saved_s = saved_s
        self.waited_s = waited_s
        self.choice = choice
        self.compute = compute
        self.computed_elsewhere = computed_elsewhere
        self._plane = plane
        self._refs = {(ref.index, ref.group): ref for ref in self.blocks}
        self._deadline = deadline
        self._corrupt: list[tuple[int, int]] = []
        self._released = False

    def view(self, index: int, group: int = 0) -> memoryview:
        ref = self._ref(index, group)
        data = self._plane.view(ref).toreadonly()
        self._compare(xxhash.xxh3_64_intdigest(data), ref)
        return data

    def read_into(self, index: int, out: memoryview, group: int = 0) -> None:
        ref = self._ref(index, group)
        if len(out) < ref.length:
            raise BodyMismatch(f"a block of {ref.length} bytes does not fit a buffer of {len(out)}")
        self._compare(copy_and_sum(out[: ref.length], self._plane.view(ref)), ref)

    def device_view(self, index: int, group: int = 0) -> DeviceBlock | None:
        return self._plane.device_view(self._ref(index, group))

    def renew(self, ttl_s: float) -> None:
        asked = time.monotonic()
        self.check_live()
        self._deadline = asked + (self._plane.renew(self.id, ttl_s) if self.id else ttl_s)

    def release(self) -> None:
        if not self._released:
            self._released = True
            if not self.id:
                return
            with contextlib.suppress(LeaseLost):
                self._plane.release(self.id, self._corrupt)

    def hand_over(self) -> LeaseHandle:
        """Give the lease to another holder, who reads and releases it: `take_over`. Here it has ended."""
        self._released = True
        return LeaseHandle(self.id, self.blocks, self._plane.generation, self._deadline)

    def _ref(self, index: int, group: int) -> BlockRef:
        self.check_live()
        try:
            return self._refs[index, group]
        except KeyError:
            raise InvalidRequest(f"block {index} of group {group} is not part of this lease") from None

    def check_live(self) -> None:
        """Raise `LeaseLost` if the lease has ended."""
        if self._released or time.monotonic() >= self._deadline:
            raise LeaseLost("the read lease has ended", remedy="acquire again, with a longer ttl_s")

    def _compare(self, checksum: int, ref: BlockRef) -> None:
        self.check_live()  # after the deadline the memory may be somebody else's: not this block's damage
        if checksum != ref.checksum:
            self._corrupt.append((ref.index, ref.group))
            raise CorruptBlock(
                f"block {ref.index} of group {ref.group} in the {ref.tier} tier does not match its checksum",
                remedy="recompute it; the damaged copy is removed when the lease is released",
            )


class LeasedComputer(ComputeLease):
    """A `ComputeLease` over a plane."""

    def __init__(self, plane: Plane, lease_id: str, start: int, stop: int) -> None:
        self.id = lease_id
        self.start = start
        self.stop = stop
        self._plane = plane
        self._released = False

    def renew(self, compute_s: float) -> None:
        if self._released:
            raise LeaseLost("the compute lease has ended", remedy="acquire again")
        self._plane.renew(self.id, compute_s)

    def release(self) -> None:
        if not self._released:
            self._released = True
            with contextlib.suppress(LeaseLost):
                self._plane.release(self.id, ())


class LeasedWriter(WriteLease):
    """A `WriteLease` over a plane. `deadline` as in `LeasedReader`. `publish` tells the owner of blocks summed here, in
    place; None: like anybody, by the plane's `commit`."""

    def __init__(
        self,
        plane: Plane,
        lease_id: str,
        grants: Iterable[Grant],
        *,
        deadline: float,
        publish: Callable[[str, Sequence[Written]], int] | None = None,
    ) -> None:
        self.id = lease_id
        self.grants = tuple(grants)
        self._plane = plane
        self._publish = publish or plane.commit
        self._open = {(grant.index, grant.group): grant for grant in self.granted}
        self._sums: dict[tuple[int, int], int] = {}
        self._deadline = deadline
        self._ended = False

    def buffer(self, index: int, group: int = 0) -> memoryview:
        self._check_live()
        self._sums.pop((index, group), None)
        try:
            return self._plane.view(self._open[index, group])
        except KeyError:
            raise InvalidRequest(f"block {index} of group {group} is not open under this lease") from None

    def write(self, index: int, payload: Buffer, group: int = 0) -> None:
        slot = self.buffer(index, group)
        if memoryview(payload).nbytes != len(slot):
            raise BodyMismatch(f"{memoryview(payload).nbytes} bytes do not fill a block of {len(slot)}")
        self._sums[index, group] = copy_and_sum(slot, payload)

    def commit(self, indices: Iterable[int] | None = None) -> int:
        self._check_live()
        still_open = dict(self._open)  # another thread may be committing too
        known = {index for index, _ in still_open}
        wanted = known if indices is None else set(indices)
        if wanted - known:
            raise InvalidRequest(
                f"blocks {sorted(wanted - known)} are not open under this lease",
                remedy="commit each granted block once",
            )
        grants = [grant for grant in still_open.values() if grant.index in wanted]
        if not grants:
            return 0
        written = [Written(g.index, g.group, g.length, self._sum(g)) for g in grants]
        accepted = self._publish(self.id, written)
        for grant in grants:
            self._open.pop((grant.index, grant.group), None)
        return accepted

    def _sum(self, grant: Grant) -> int:
        known = self._sums.get((grant.index, grant.group))
        return xxhash.xxh3_64_intdigest(self._plane.view(grant)) if known is None else known

    def renew(self, ttl_s: float) -> None:
        asked = time.monotonic()
        self._check_live()
        self._deadline = asked + (self._plane.renew(self.id, ttl_s) if self.id else ttl_s)

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            if not self.id:
                return
            with contextlib.suppress(LeaseLost):
                self._plane.abort(self.id)

    def _check_live(self) -> None:
        if self._ended or time.monotonic() >= self._deadline:
            raise LeaseLost("the write lease has ended", remedy="reserve again, with a longer ttl_s")


def take_over(plane: Plane, handle: LeaseHandle) -> LeasedReader:
    """Return a lease that somebody else has acquired. What was found out then (tiers, misses) stays with them."""
    return LeasedReader(
        plane,
        handle.id,
        handle.blocks,
        hit_blocks=0,
        hit_tokens=0,
        published_blocks=0,
        tokens_by_tier={},
        missed_tokens={},
        saved_s=0.0,
        waited_s=0.0,
        choice=LoadChoice("in_memory", 0, 0.0, 0.0),
        compute=None,
        computed_elsewhere=False,
        deadline=handle.deadline,
    )


def read_leased(cache: Cache, chain: Chain, index: int, out: memoryview, group: int, wait_s: float) -> bool:
    """`Cache.read_into` by way of a lease."""
    if not 0 <= index < len(chain):
        raise InvalidRequest(f"a chain of {len(chain)} blocks has no block {index}")
    with cache.acquire(Chain(chain.namespace, chain.hashes[: index + 1]), wait_s=wait_s) as lease:
        if not any((ref.index, ref.group) == (index, group) for ref in lease.blocks):
            return False
        try:
            lease.read_into(index, out, group)
        except CorruptBlock:  # counted and removed when the lease is released
            return False
        return True
