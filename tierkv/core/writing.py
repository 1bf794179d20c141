"""Writing: reserve, commit and abort."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.cache import Grant, Written
from tierkv.core.computing import Computing
from tierkv.core.index import Entry
from tierkv.core.keying import ChainKeys
from tierkv.core.leases import Draft, LeaseTable, WriteRecord
from tierkv.core.sessions import SHARED
from tierkv.core.state import NamespaceInfo, State
from tierkv.core.steps import Pause, Step
from tierkv.core.tenants import Tenant
from tierkv.errors import ChecksumMismatch, InvalidRequest
from tierkv.storage.tier import NO_PARENT, BlockMeta, Slot, checksum

__all__ = ["Place", "Reserved", "Writer"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the first of the blocks to be written goes.

    Attributes
    ----------
    group
        The KV group they belong to; None: every group's.
    parent, depth
        Storage key of the block before the first one, and how many there are before it in all.
    """

    group: int | None = None
    parent: bytes = NO_PARENT
    depth: int = 0


_START = Place()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The result of a reservation.

    `id` is empty when nothing was granted; `deadline` is the lease's, on the monotonic clock; times in seconds.
    """

    id: str
    deadline: float
    waited_s: float
    grants: tuple[Grant, ...]


_Published = tuple[bytes, int, Entry]  # chain hash, level


class Writer:
    """Hands out slots and publishes what was written into them.

    Parameters
    ----------
    wake
        Called (with the lock held) when blocks may have become due for demotion.
    quarantine_s
        Seconds for which the slot of a writer that lost its lease is kept from reuse: such a writer may not know yet.
    """

    def __init__(self, state: State, computing: Computing, wake: Callable[[], None], quarantine_s: float) -> None:
        self._state = state
        self._computing = computing
        self._wake = wake
        self._quarantine_s = quarantine_s
        # Without a cold tier eviction from memory unpublishes: a chain must not lose its head while it is written.
        self._hold = state.placement.cold is None

    def reserve(
        self,
        tenant: Tenant,
        namespace: str,
        hashes: Sequence[bytes],
        *,
        start: int,
        stop: int | None,
        wait_s: float,
        ttl_s: float,
        tiers: frozenset[str],
        session: str = "",
        place: Place = _START,
    ) -> Step[Reserved]:
        """See `tierkv.cache.Cache.reserve`. `tiers`: the memory tiers the caller can write in place."""
        state = self._state
        asked = time.monotonic()
        deadline = asked + wait_s
        stop = len(hashes) if stop is None else stop
        if not 0 <= start <= stop <= len(hashes):
            raise InvalidRequest(f"blocks [{start}, {stop}) are not within a chain of {len(hashes)}")
        state.sessions.check(session)
        with state.lock:
            info = state.namespace(namespace)
            lease = WriteRecord(LeaseTable.new_id(), tenant.id, time.monotonic() + ttl_s, hashes, {})
            keys = state.keys.of(tenant, hashes)
            for group in range(len(info.sizes)):  # all at once: they are wanted one by one below
                keys.upto(group, stop)
            lease.chain = self._hold_prefix(keys, info, stop, place.parent)
            if session:
                lease.session = state.sessions.use(tenant.id, info.name, session, tuple(hashes))
        levels = [level for level, memory in enumerate(state.placement.memory) if memory.tier.name in tiers]
        groups = range(len(info.layouts)) if place.group is None else (place.group,)
        todo = deque((index, group) for index in range(start, stop) for group in groups)
        grants: list[Grant] = []
        handed_over = False
        try:
            while todo:
                last_try = time.monotonic() >= deadline
                with state.lock:
                    while todo:
                        grant = self._grant(lease, tenant, info, keys, place, todo[0], levels, lossy=last_try)
                        if grant is None:
                            break
                        grants.append(grant)
                        todo.popleft()
                    room = state.room.next()
                    if todo:
                        self._wake()
                if todo and last_try:
                    grants.extend(Grant(index, group, "no_room") for index, group in todo)
                    break
                if todo:
                    yield Pause([room], deadline)
            with state.lock:
                if lease.drafts:  # not live before: it must not expire while it waits for room
                    lease.deadline = time.monotonic() + ttl_s
                    state.leases.add(lease)
                    handed_over = True
            waited_s = lease.deadline - ttl_s - asked
            return Reserved(lease.id if handed_over else "", lease.deadline, waited_s, tuple(grants))
        finally:
            if not handed_over:
                with state.lock:
                    self.end(lease, quarantine=False)

    def commit(self, tenant: Tenant, lease_id: str, written: Sequence[Written], *, summed_here: bool = False) -> int:
        """See `tierkv.cache.WriteLease.commit`. Reads every block once to verify it.

        Not with `summed_here`: the sums were computed a moment ago in this process, from the slots themselves. A second
        reading would compare the bytes with themselves; it proves something only of sums that somebody else announced.
        """
        state = self._state
        if len({(block.index, block.group) for block in written}) < len(written):
            raise InvalidRequest("a block is named twice in one commit", remedy="commit each granted block once")
        if not summed_here:
            self._verify(tenant, lease_id, written)
        with state.lock:
            # The lease may have expired, or a block been committed by another thread, meanwhile.
            lease = self._find(tenant, lease_id)
            drafts = [self._draft(lease, block) for block in written]
            for draft, block in zip(drafts, written, strict=True):
                draft.meta = draft.meta._replace(checksum=block.checksum)
                draft.written = True
            published: list[_Published] = []
            for draft in sorted(drafts, key=lambda d: d.index):
                published.extend(self._publish_or_wait(lease, draft))
            if published:
                hashes, levels, entries = zip(*published, strict=True)
                tiers = [state.placement.names[level] for level in levels]
                state.ledger.stored(entries, hashes, tiers)
                if state.sharing is not None:
                    state.sharing.published(entries)
                self._computing.published(entry.key for entry in entries)
            if any(map(state.placement.overdue, range(len(state.placement.memory)))):
                self._wake()
        return len(drafts)

    def _verify(self, tenant: Tenant, lease_id: str, written: Sequence[Written]) -> None:
        """Compare announced sums with the bytes in the slots. Raises `ChecksumMismatch` for the first that differs."""
        state = self._state
        with state.lock:
            lease = self._find(tenant, lease_id)
            drafts = [self._draft(lease, block) for block in written]
        for draft, block in zip(drafts, written, strict=True):
            view = state.placement.memory[draft.level].tier.view(draft.slot, block.length)
            if checksum(view) != block.checksum:
                with state.lock:
                    self._discard(lease, draft, quarantine=True)
                raise ChecksumMismatch(
                    f"block {block.index} of group {block.group} does not match the checksum it was committed with",
                    remedy="nothing of this commit was published; write the block again under a new reservation",
                )

    def grants(self, tenant: Tenant, lease_id: str) -> list[Grant]:
        """Return the blocks still to be written under a live lease. Raises `LeaseLost`."""
        state = self._state
        with state.lock:
            open_drafts = [draft for draft in self._find(tenant, lease_id).drafts.values() if not draft.written]
            return [self._granted(draft) for draft in open_drafts]

    def holds(self, tenant: Tenant, lease_id: str, grant: Grant) -> bool:
        """Say whether a granted block may still be written under a live lease. Raises `LeaseLost`."""
        with self._state.lock:
            draft = self._find(tenant, lease_id).drafts.get((grant.index, grant.group))
            return draft is not None and not draft.written

    def abort(self, tenant: Tenant, lease_id: str) -> None:
        """End a write lease; what was committed stays. Raises `LeaseLost`."""
        state = self._state
        with state.lock:
            lease = self._find(tenant, lease_id)
            for draft in [d for d in lease.drafts.values() if not d.written]:
                self._discard(lease, draft, quarantine=False)
            lease.closed = True
            self._end_if_done(lease)

    def end(self, lease: WriteRecord, *, quarantine: bool) -> None:
        """Give back what a lease still holds (with the lock held).

        The whole chain is renewed from its tail to its head, so that later eviction takes the tail first.
        """
        placement = self._state.placement
        for draft in list(lease.drafts.values()):
            self._discard(lease, draft, quarantine=quarantine)
        if lease.session is not None:
            self._state.sessions.own(lease.session, lease.chain)
        # What was there before has been used once more: else a tail that comes back could outlast it.
        written = [(entry, True) for entry in lease.chain] + [(entry, False) for entry in lease.published]
        for entry, again in sorted(written, key=lambda item: item[0].meta.depth, reverse=True):
            placement.touch(entry, again=again)
            if self._hold:
                placement.unpin(entry)
        lease.chain, lease.published = [], []
        self._state.room.signal()

    def _end_if_done(self, lease: WriteRecord) -> None:
        """End a closed lease unless committed blocks of it still wait, until its deadline, for a predecessor."""
        if lease.closed and not lease.drafts:
            self._state.leases.remove(lease)
            self.end(lease, quarantine=False)

    def _find(self, tenant: Tenant, lease_id: str) -> WriteRecord:
        lease = self._state.leases.find(lease_id, tenant.id)
        if not isinstance(lease, WriteRecord):
            raise InvalidRequest(
                "this lease is not for writing", remedy="commit and abort take the lease of a reservation"
            )
        return lease

    def _hold_prefix(self, keys: ChainKeys, info: NamespaceInfo, stop: int, parent: bytes) -> list[Entry]:
        """Return the blocks in memory that a chain begins with, held for as long as its lease lasts.

        Those that only the cold tier has are not held: they have no place in a memory tier's order.
        """
        before = self._state.index.awake(parent)
        prefix: list[Entry] = [before] if before is not None else []
        for index in range(stop):
            found = [self._state.index.awake(keys.at(index, group)) for group in range(len(info.layouts))]
            if not any(found):
                break
            prefix.extend(entry for entry in found if entry is not None)
        for entry in prefix:
            entry.pins += self._hold
        return prefix

    def _grant(
        self,
        lease: WriteRecord,
        tenant: Tenant,
        info: NamespaceInfo,
        keys: ChainKeys,
        place: Place,
        block: tuple[int, int],
        levels: Sequence[int],
        *,
        lossy: bool,
    ) -> Grant | None:
        """Answer for one block, or None when there is no room for it yet."""
        state = self._state
        index, group = block
        key = keys.at(index, group)
        if state.index.here(key):
            return Grant(index, group, "present")
        if key in state.writing:
            return Grant(index, group, "busy")
        length = info.sizes[group]
        found = self._allocate(length, tenant.id, levels, lossy=lossy)
        if found is None:
            return None
        level, slot = found
        parent = keys.at(index - 1, group) if index else place.parent
        meta = BlockMeta(length, 0, parent, info.fingerprint, tenant.id, place.depth + index, group)
        draft = Draft(index, key, meta, level, slot)
        lease.drafts[block] = draft
        state.writing[key] = draft
        return self._granted(draft)

    def _allocate(self, length: int, tenant: bytes, levels: Sequence[int], *, lossy: bool) -> tuple[int, Slot] | None:
        """Take a slot in the fastest of `levels` that has room. Blocks are lost for it only when none has."""
        for losing in (False, True) if lossy else (False,):
            for level in levels:
                slot = self._state.placement.allocate(level, length, tenant, lossy=losing)
                if slot is not None:
                    return level, slot
        return None

    def _granted(self, draft: Draft) -> Grant:
        tier = self._state.placement.memory[draft.level].tier
        return Grant(draft.index, draft.meta.group, "granted", tier.name, draft.slot.offset, draft.meta.length)

    @staticmethod
    def _draft(lease: WriteRecord, block: Written) -> Draft:
        draft = lease.drafts.get((block.index, block.group))
        if draft is None or draft.written:
            raise InvalidRequest(
                f"block {block.index} of group {block.group} is not open under this lease",
                remedy="commit each granted block once",
            )
        if block.length != draft.meta.length:
            raise InvalidRequest(f"block {block.index} has {draft.meta.length} bytes, the commit says {block.length}")
        return draft

    def _publish_or_wait(self, lease: WriteRecord, draft: Draft) -> list[_Published]:
        """Publish a written block, and what waited for it, if its own predecessor is published; return them."""
        state = self._state
        index, writing, placement = state.index, state.writing, state.placement
        published: list[_Published] = []
        ready = [(lease, draft)]
        while ready:
            owner, block = ready.pop()
            meta = block.meta
            parent = meta.parent
            if parent != NO_PARENT and parent not in index and not self._is_windowed(meta):
                state.waiting.setdefault(parent, []).append((owner, block))
                continue
            del owner.drafts[block.index, meta.group]
            del writing[block.key]
            entry = index.awake(block.key)
            if entry is None:
                entry = Entry(block.key, meta)
                index.add(entry)
            else:  # a block of the shared tier, about to be loaded
                entry.meta, entry.levels = meta, 0
            entry.pins += self._hold
            entry.owner = owner.session or SHARED  # what nobody is named for, no session's end may retire
            placement.settle(entry, block.level, block.slot)
            placement.enlist(entry, block.level)
            owner.published.append(entry)
            published.append((owner.hashes[block.index], block.level, entry))
            if state.waiting:
                ready.extend(state.waiting.pop(block.key, ()))
            if owner.closed:
                self._end_if_done(owner)
        return published

    def _is_windowed(self, meta: BlockMeta) -> bool:
        info = self._state.namespaces[meta.namespace.hex()]
        return info.spec.groups[meta.group].kind == "sliding_window"

    def _discard(self, lease: WriteRecord, draft: Draft, *, quarantine: bool) -> None:
        """Give up a draft. Its slot is kept from reuse for a while if its writer may still be at it."""
        state = self._state
        if lease.drafts.pop((draft.index, draft.meta.group), None) is None:
            return
        state.writing.pop(draft.key, None)
        waiting = [pair for pair in state.waiting.pop(draft.meta.parent, ()) if pair[1] is not draft]
        if waiting:
            state.waiting[draft.meta.parent] = waiting
        placement = state.placement
        if quarantine:
            placement.disown(draft.level, draft.slot, draft.meta.tenant)
            tier = placement.memory[draft.level].tier
            state.quarantine.append((time.monotonic() + self._quarantine_s, tier, draft.slot))
        else:
            placement.discard(draft.level, draft.slot, draft.meta.tenant)
