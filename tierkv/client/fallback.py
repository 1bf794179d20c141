"""Leases and tickets that never raise for reasons of the cache: what does not work comes to nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from tierkv.cache import (
    ComputeLease,
    Grant,
    LoadChoice,
    ReadLease,
    Ticket,
    TicketProgress,
    WriteLease,
)
from tierkv.client.guard import Calls, check_seconds
from tierkv.errors import CorruptBlock, InvalidRequest, LeaseLost
from tierkv.handles import LeasedReader, LeasedWriter
from tierkv.storage.device import DeviceBlock

__all__ = ["SafeReadLease", "SafeTicket", "SafeWriteLease"]

_NOTHING = TicketProgress("done", 0, 0, 0, 0)


class SafeTicket(Ticket):
    """A prefetch; one that could not be started, None, is done."""

    def __init__(self, calls: Calls, ticket: Ticket | None) -> None:
        self.id = "" if ticket is None else ticket.id
        self._calls = calls
        self._ticket = ticket

    def progress(self) -> TicketProgress:
        return _NOTHING if self._ticket is None else self._calls.make(self._ticket.progress, _NOTHING)

    def wait(self, wait_s: float, *, groups: int | None = None) -> TicketProgress:
        check_seconds("wait_s", wait_s)
        ticket = self._ticket
        if ticket is None:
            return _NOTHING
        return self._calls.make(lambda: ticket.wait(wait_s, groups=groups), _NOTHING, wait_s=wait_s)

    def cancel(self) -> None:
        if self._ticket is not None:
            self._calls.make(self._ticket.cancel, None)


class _SafeComputeLease(ComputeLease):
    """The promise of a compute lease. Whether it can be kept alive or not, its holder computes."""

    def __init__(self, calls: Calls, lease: ComputeLease) -> None:
        self.id, self.start, self.stop = lease.id, lease.start, lease.stop
        self._calls = calls
        self._lease = lease

    def renew(self, compute_s: float) -> None:
        check_seconds("compute_s", compute_s, zero=False)
        self._calls.make(lambda: self._lease.renew(compute_s), None)

    def release(self) -> None:
        self._calls.make(self._lease.release, None)


class SafeReadLease(ReadLease):
    """A read lease of which every block has arrived and was verified when it was made.

    The hit ends where a block did not verify or was not here by the deadline. `view` returns what was verified then.
    Blocks on a device were verified before they were copied there; `view` of one copies it back, verifies the copy, and
    raises what `ReadLease.view` raises.

    Raises `LeaseLost` from `view` and `read_into` when the lease is over: then the caller has held it for longer than
    it asked for, and memory may be another block's. `read_into` verifies the copy and raises `CorruptBlock` in the one
    case where nothing else would be true: the memory has been damaged under the lease.
    """

    def __init__(
        self,
        calls: Calls,
        lease: LeasedReader | None,
        *,
        missed_tokens: Mapping[str, int],
        deadline: float,
    ) -> None:
        self._calls = calls
        self._lease = lease
        self._views: dict[tuple[int, int], memoryview | DeviceBlock] = {}
        self.id = ""
        self.blocks = ()
        self.hit_blocks = self.hit_tokens = self.published_blocks = 0
        self.tokens_by_tier = {}
        self.missed_tokens = missed_tokens
        self.saved_s = self.waited_s = 0.0
        self.choice = LoadChoice("miss", 0, 0.0, 0.0)
        self.compute = None
        self.computed_elsewhere = False
        if lease is not None:
            self._adopt(lease, deadline)

    def view(self, index: int, group: int = 0) -> memoryview:
        lease = self._holding(index, group)
        lease.check_live()
        found = self._views[index, group]
        return lease.view(index, group) if isinstance(found, DeviceBlock) else found

    def device_view(self, index: int, group: int = 0) -> DeviceBlock | None:
        lease = self._holding(index, group)
        lease.check_live()
        found = self._views[index, group]
        return found if isinstance(found, DeviceBlock) else None

    def read_into(self, index: int, out: memoryview, group: int = 0) -> None:
        self._holding(index, group).read_into(index, out, group)

    def renew(self, ttl_s: float) -> None:
        check_seconds("ttl_s", ttl_s, zero=False)
        if self._lease is not None:
            lease = self._lease
            self._calls.make(lambda: lease.renew(ttl_s), None)

    def release(self) -> None:
        if self._lease is not None:
            self._calls.make(self._lease.release, None)
        self._views = {}

    def _adopt(self, lease: LeasedReader, deadline: float) -> None:
        self.id = lease.id
        self.published_blocks = lease.published_blocks
        self.missed_tokens = lease.missed_tokens
        self.waited_s = lease.waited_s
        self.choice = lease.choice
        self.compute = None if lease.compute is None else _SafeComputeLease(self._calls, lease.compute)
        self.computed_elsewhere = lease.computed_elsewhere
        reason = self._verify(lease, deadline)
        blocks = _usable(lease, self._views)
        self.hit_blocks, self.hit_tokens = blocks, blocks * (lease.hit_tokens // max(1, lease.hit_blocks))
        self.blocks = tuple(ref for ref in lease.blocks if ref.index < blocks)
        self._views = {where: view for where, view in self._views.items() if where[0] < blocks}
        self.tokens_by_tier, lost = _cut(lease.tokens_by_tier, self.hit_tokens)
        self.saved_s = lease.saved_s if not lost else 0.0
        if lost:
            self.missed_tokens = {**lease.missed_tokens, reason: lease.missed_tokens.get(reason, 0) + lost}

    def _verify(self, lease: LeasedReader, deadline: float) -> str:
        """Keep the blocks that are what they should be, up to the first that is not; return why it is not."""

        def view_all() -> str:
            for ref in lease.blocks:
                if time.monotonic() >= deadline:
                    break
                try:
                    on_device = lease.device_view(ref.index, ref.group)
                    self._views[ref.index, ref.group] = on_device or lease.view(ref.index, ref.group)
                except CorruptBlock as error:
                    self._calls.missed(error)
                    return "corrupt"
            return "late"

        return self._calls.make_until(deadline, view_all, "late")

    def _holding(self, index: int, group: int) -> LeasedReader:
        if self._lease is None or (index, group) not in self._views:
            if self._lease is not None:
                self._lease.check_live()
            raise InvalidRequest(f"block {index} of group {group} is not part of this lease")
        return self._lease


class SafeWriteLease(WriteLease):
    """A write lease. Once it is lost, what is written goes nowhere and commits accept nothing."""

    def __init__(self, calls: Calls, lease: LeasedWriter | None, refused: tuple[Grant, ...] = ()) -> None:
        self.id = "" if lease is None else lease.id
        self.grants = refused if lease is None else lease.grants
        self._calls = calls
        self._lease = lease
        self._lengths = {(grant.index, grant.group): grant.length for grant in self.granted}

    def buffer(self, index: int, group: int = 0) -> memoryview:
        lease = self._holding(index, group)
        try:
            return lease.buffer(index, group)
        except LeaseLost as error:
            self._calls.missed(error)
            return memoryview(bytearray(self._lengths[index, group]))

    def write(self, index: int, payload: bytes | bytearray | memoryview, group: int = 0) -> None:
        lease = self._holding(index, group)
        try:
            lease.write(index, payload, group)
        except LeaseLost as error:
            self._calls.missed(error)

    def commit(self, indices: Iterable[int] | None = None) -> int:
        wanted = None if indices is None else set(indices)
        known = {index for index, _ in self._lengths}
        if wanted is not None and wanted - known:
            raise InvalidRequest(f"blocks {sorted(wanted - known)} were not granted", remedy="commit what was granted")
        lease = self._lease
        return 0 if lease is None else self._calls.make(lambda: lease.commit(wanted), 0)

    def renew(self, ttl_s: float) -> None:
        check_seconds("ttl_s", ttl_s, zero=False)
        if self._lease is not None:
            lease = self._lease
            self._calls.make(lambda: lease.renew(ttl_s), None)

    def abort(self) -> None:
        if self._lease is not None:
            self._calls.make(self._lease.abort, None)

    def _holding(self, index: int, group: int) -> LeasedWriter:
        if self._lease is None or (index, group) not in self._lengths:
            raise InvalidRequest(f"block {index} of group {group} was not granted")
        return self._lease


def _usable(lease: LeasedReader, views: Collection[tuple[int, int]]) -> int:
    """Return how long a prefix the verified blocks of a lease make."""
    if not lease.blocks:
        return 0
    if len(views) == len(lease.blocks):
        return lease.hit_blocks
    first_missing = min(ref.index for ref in lease.blocks if (ref.index, ref.group) not in views)
    # A shorter prefix needs other blocks of a sliding window than the lease has, so it takes groups without gaps.
    groups = {ref.group for ref in lease.blocks}
    gapless = all((index, group) in views for group in groups for index in range(first_missing))
    return first_missing if gapless else 0


def _cut(tokens_by_tier: Mapping[str, int], hit_tokens: int) -> tuple[dict[str, int], int]:
    """Take tokens away until `hit_tokens` are left, from the tiers named last; return the rest and how many."""
    excess = sum(tokens_by_tier.values()) - hit_tokens
    lost, kept = excess, dict(tokens_by_tier)
    for tier in reversed(kept):
        taken = min(kept[tier], excess)
        kept[tier] -= taken
        excess -= taken
    return {tier: tokens for tier, tokens in kept.items() if tokens}, lost
