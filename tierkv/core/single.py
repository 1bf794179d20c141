"""One block at a time, by its chain hash: for people with curl and tools that look, not for engines.

A read is a use of the block, as far as eviction is concerned; it is not counted as a request for a prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierkv.cache import BlockRef, Written
from tierkv.core.index import Entry
from tierkv.core.leases import LeaseTable, ReadRecord
from tierkv.core.load import Load
from tierkv.core.loads import Loader
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step
from tierkv.core.tenants import Tenant
from tierkv.core.writing import Place, Reserved, Writer
from tierkv.errors import Conflict, CorruptBlock, InvalidRequest, LeaseLost, NotFound, NotLoaded, StorageError, TierFull
from tierkv.spec import BlockLayout
from tierkv.storage.tier import Slot, checksum

__all__ = ["Found", "Held", "SingleBlocks"]

_LEASE_S = 60.0
"""Longest time from the grant of a slot, or of a read, to its end: only bytes are copied in between."""


@dataclass(frozen=True, slots=True)
class Found:
    """A published block: the fastest tier that holds it, its size in bytes, its XXH3-64, blocks before it."""

    tier: str
    length: int
    checksum: int
    depth: int


@dataclass(frozen=True, slots=True)
class Held:
    """A block that stays in memory for one reader, until `SingleBlocks.copy`."""

    lease: str
    ref: BlockRef


class SingleBlocks:
    """Finds, reads and writes single blocks.

    Parameters
    ----------
    release
        Ends a read lease, with the blocks of it that were found corrupt: `Engine.release`.
    """

    def __init__(
        self,
        state: State,
        loader: Loader,
        writer: Writer,
        release: Callable[[Tenant, str, Sequence[tuple[int, int]]], None],
    ) -> None:
        self._state = state
        self._loader = loader
        self._writer = writer
        self._release = release
        self._tiers = frozenset(m.tier.name for m in state.placement.memory if m.tier.addressable)

    def size(self, namespace: str, group: int) -> int:
        """Return the size of a group's blocks in bytes. Raises `NotFound`; `InvalidRequest` for an unknown group."""
        with self._state.lock:
            return self._layout(namespace, group).nbytes

    def find(self, tenant: Tenant, namespace: str, chain_hash: bytes, group: int) -> Found:
        """Look a block up, without side effects. Raises `NotFound`; `InvalidRequest` for an unknown group."""
        state = self._state
        with state.lock:
            entry = self._published(self._key(tenant, namespace, chain_hash, group))
            meta, tier = entry.meta, state.placement.names[entry.fastest()]
            state.index.rest(entry)
        return Found(tier, meta.length, meta.checksum, meta.depth)

    def read(self, tenant: Tenant, namespace: str, chain_hash: bytes, group: int, *, wait_s: float) -> Step[Held]:
        """Hold a block in a memory tier, loading it if need be; to be followed by `copy`.

        Raises `NotFound`, `CorruptBlock` when the stored copy fails verification (it is removed), `NotLoaded` when the
        load takes longer than `wait_s`, `TierFull` when there is no room for it, and `StorageError`.
        """
        state = self._state
        deadline = time.monotonic() + wait_s
        with state.lock:
            key = self._key(tenant, namespace, chain_hash, group)
            entry = self._published(key)
            entry.pins += 1  # it stays awake
        load: Load | None = None
        try:
            while True:
                with state.lock:
                    if not entry.levels:
                        raise _not_found() if load is None else _failed(load)
                    held = self._hold(tenant, entry, fresh=load is not None)
                    if held is not None:
                        return held
                    if load is not None and load.future.done():
                        raise _failed(load)
                    if time.monotonic() >= deadline:
                        raise NotLoaded(
                            f"the block is not in memory after {wait_s:g} seconds", remedy="ask again, or wait longer"
                        )
                    if load is None:
                        level = len(state.placement.memory) - 1
                        load = self._loader.want(key, entry.meta.length, level, deadline)
                yield Pause([load.future], deadline)
        finally:
            with state.lock:
                if load is not None:
                    self._loader.unwant(load)
                state.placement.unpin(entry)

    def copy(self, tenant: Tenant, held: Held) -> bytes:
        """Return a verified copy of a held block, and let go of it. Blocks.

        Raises `CorruptBlock` when the copy in memory is damaged, which is then removed, and `LeaseLost`.
        """
        ref = held.ref
        tier = next(m.tier for m in self._state.placement.memory if m.tier.name == ref.tier)
        payload = bytearray(ref.length)
        corrupt: list[tuple[int, int]] = []
        try:
            tier.read(Slot(ref.offset, ref.length), memoryview(payload))
            if checksum(payload) != ref.checksum:
                corrupt.append((ref.index, ref.group))
                raise CorruptBlock(
                    f"the block's copy in the {ref.tier} tier fails verification",
                    remedy="it is removed: ask again for another tier's copy, or store the block anew",
                )
        finally:
            self._release(tenant, held.lease, corrupt)
        return bytes(payload)

    def reserve(
        self,
        tenant: Tenant,
        namespace: str,
        chain_hash: bytes,
        group: int,
        *,
        parent: bytes | None,
        wait_s: float,
    ) -> Step[Reserved | None]:
        """Ask for a slot for one block behind its published `parent` (a chain hash; None: it is the first of a chain).

        None when it is published already. Raises `Conflict` when the parent is not published or somebody else is
        writing the block, and `TierFull` when no slot becomes free within `wait_s` seconds.
        """
        state = self._state
        with state.lock:
            self._key(tenant, namespace, chain_hash, group)
            place = Place(group)
            if parent is not None:
                before = state.index.wake(tenant.block_key(parent, group))
                if before is None:
                    raise Conflict(
                        f"block {parent.hex()[:16]}... before this one is not published in group {group}",
                        remedy="store the blocks of a chain from its first to its last",
                    )
                place = Place(group, before.key, before.meta.depth + 1)
                state.index.rest(before)
        reserved = yield from self._writer.reserve(
            tenant,
            namespace,
            [chain_hash],
            start=0,
            stop=1,
            wait_s=wait_s,
            ttl_s=_LEASE_S,
            tiers=self._tiers,
            place=place,
        )
        (grant,) = reserved.grants
        if grant.state == "busy":
            raise Conflict("somebody else is writing this block", remedy="ask again in a moment")
        if grant.state == "no_room":
            raise TierFull("every slot is leased or not written to the tier below yet", remedy="try again")
        return reserved if grant.state == "granted" else None

    def write(self, tenant: Tenant, reserved: Reserved, payload: bytes) -> None:
        """Fill the slot of a reservation with a payload of the block's size, publish it, and end the lease. Blocks.

        Raises `ChecksumMismatch`, and `LeaseLost` when the lease has ended.
        """
        (grant,) = reserved.grants
        tier = next(m.tier for m in self._state.placement.memory if m.tier.name == grant.tier)
        try:
            tier.write(Slot(grant.offset, grant.length), payload)
            written = Written(grant.index, grant.group, grant.length, checksum(payload))
            self._writer.commit(tenant, reserved.id, [written])
        finally:
            with suppress(LeaseLost):
                self._writer.abort(tenant, reserved.id)

    def _key(self, tenant: Tenant, namespace: str, chain_hash: bytes, group: int) -> bytes:
        self._layout(namespace, group)
        return tenant.block_key(chain_hash, group)

    def _layout(self, namespace: str, group: int) -> BlockLayout:
        layouts = self._state.namespace(namespace).layouts
        if group >= len(layouts):
            raise InvalidRequest(
                f"there is no group {group}", remedy=f"the namespace's groups are 0 to {len(layouts) - 1}"
            )
        return layouts[group]

    def _published(self, key: bytes) -> Entry:
        """Return a block of this machine: of one that is elsewhere nobody knows the checksum before it has come."""
        entry = self._state.index.wake(key)
        if entry is None or entry.levels == self._state.index.shared_bit:
            if entry is not None:
                self._state.index.rest(entry)
            raise _not_found()
        return entry

    def _hold(self, tenant: Tenant, entry: Entry, *, fresh: bool) -> Held | None:
        """Lease a block that lies in memory, and note its use."""
        state, meta = self._state, entry.meta
        for level, memory in enumerate(state.placement.memory):
            if memory.tier.name not in self._tiers or not entry.levels >> level & 1:
                continue
            slot = memory.tier.slot(entry.key)
            assert slot is not None
            ref = BlockRef(meta.depth, meta.group, memory.tier.name, slot.offset, meta.length, meta.checksum)
            lease = ReadRecord(LeaseTable.new_id(), tenant.id, time.monotonic() + _LEASE_S, [entry], (ref,))
            state.leases.add(lease)
            entry.pins += 1
            state.placement.touch(entry, again=entry.arrival is None and not fresh)
            state.placement.touch_cold([entry.key])
            entry.arrival = None
            return Held(lease.id, ref)
        return None


def _not_found() -> NotFound:
    return NotFound("the block is not published", remedy="store it first; it may have been evicted")


def _failed(load: Load) -> Exception:
    """The error for a load that did not bring its block."""
    if load.failure == "corrupt":
        return CorruptBlock(
            "the block's stored copy fails verification",
            cause=load.cause,
            remedy="it is removed: store the block anew",
        )
    if load.failure == "no_room":
        return TierFull("there is no room in memory to load the block", remedy="try again")
    if load.failure == "absent":
        return _not_found()
    return StorageError("the block could not be loaded", remedy="ask again; the log and the stats may say more")
