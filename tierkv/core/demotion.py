"""Demotion: copying dirty blocks to the next slower tier, in batches, before their room is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import Lock

from tierkv.core.index import Entry
from tierkv.core.state import State
from tierkv.errors import CorruptBlock, DeviceError, NotFound, TierKVError
from tierkv.storage.tier import SupportsQuotas, Tier, verify
from tierkv.storage.transfer import copy_block

__all__ = ["Demoter", "purge"]

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
RETRY_S = 5.0
DRAIN_PASSES = 2


class Demoter:
    """Moves dirty blocks down. One batch at a time, whoever asks for it; nobody else puts blocks into the cold tier."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._placement = state.placement
        self._index = state.index
        self._counters = state.counters
        self._lock = state.lock
        self._one_at_a_time = Lock()
        self._refused_until = 0.0
        self._refusal = ""

    @property
    def refusal(self) -> str:
        """Problem type of what the cold tier said when it last refused a block; empty when it takes blocks."""
        return self._refusal if time.monotonic() < self._refused_until + RETRY_S else ""

    def run(self, *, everything: bool = False) -> int:
        """Demote one batch from the slowest memory tier that needs it; return how many blocks were dealt with. Blocks.

        `everything` also moves what is within the allowance of dirty bytes, and tries again at once after a refusal.
        """
        with self._one_at_a_time:
            for level in reversed(range(len(self._placement.memory))):
                with self._lock:
                    batch = self._pick(level, everything)
                if batch and (dealt_with := self._demote(level, batch, everything)):
                    return dealt_with
        return 0

    def drain(self) -> None:
        """Demote what is dirty, down to the last tier. Blocks.

        In so many passes, not until nothing is left: what arrives in a cold tier that is full makes others leave it,
        and copies of those in memory dirty, without end where it is smaller than memory.
        """
        for _ in range(DRAIN_PASSES):
            with self._lock:
                memory = self._placement.memory
                left = sum(len(m.dirty) * (len(memory) - level) for level, m in enumerate(memory))
            while left > 0 and (dealt_with := self.run(everything=True)):
                left -= dealt_with

    def waiting(self) -> bool:
        """Say whether `run` would find something to do now (called with the engine's lock held)."""
        if time.monotonic() < self._refused_until:
            return False
        return any(self._placement.overdue(level) for level in range(len(self._placement.memory)))

    def _pick(self, level: int, everything: bool) -> list[Entry]:
        if not everything and (time.monotonic() < self._refused_until or not self._placement.overdue(level)):
            return []
        self._placement.memory[level].pressed = False
        batch: list[Entry] = []
        size = 0
        for entry in self._placement.memory[level].dirty.values():
            if entry.key in self._index.purging:
                continue
            if batch and size + entry.meta.length > BATCH_BYTES:
                break
            entry.pins += 1
            batch.append(entry)
            size += entry.meta.length
        batch.sort(key=lambda e: e.meta.depth, reverse=True)  # tails arrive below first, so that they leave it first
        return batch

    def _demote(self, level: int, batch: Sequence[Entry], everything: bool) -> int:
        placement = self._placement
        below = level + 1
        try:
            if below == placement.cold_level:
                self._note(level, below, self._to_cold(level, batch))
            else:
                self._note(level, below, [entry for entry in batch if self._to_memory(level, below, entry)])
                if everything:
                    self._past(level, batch)
            with self._lock:
                # A damaged block was removed instead of moved: that is progress too, what is behind it comes next.
                dirty = placement.memory[level].dirty
                return sum(dirty.get(entry.key) is not entry for entry in batch)
        finally:
            with self._lock:
                for entry in batch:
                    placement.unpin(entry)

    def _to_memory(self, level: int, below: int, entry: Entry) -> bool:
        source, target = self._placement.memory[level].tier, self._placement.memory[below].tier
        with self._lock:
            if not entry.levels or entry.levels >> below & 1:
                return False
            slot = self._placement.allocate(below, entry.meta.length, entry.meta.tenant)
        if slot is None:
            return False
        arrived = False
        try:
            copy_block(source, target, entry.key, slot, entry.meta)
            with self._lock:
                if entry.levels and not entry.levels >> below & 1:
                    self._placement.settle(entry, below, slot)
                    self._placement.enlist(entry, below)
                    arrived = True
        except NotFound:
            pass  # deleted before the copy began
        except DeviceError as error:
            log.info("a block stays in the %s tier for now: %s", source.name, error)
        except CorruptBlock as error:
            with self._lock:
                self._placement.damaged(entry, level, error.cause)
        finally:
            if not arrived:
                with self._lock:
                    self._placement.discard(below, slot, entry.meta.tenant)
        return arrived

    def _verified(self, level: int, entry: Entry) -> memoryview | None:
        """Return the bytes of a pinned block, or None when it is gone or damaged (then it is removed)."""
        tier = self._placement.memory[level].tier
        slot = tier.slot(entry.key)
        if slot is None:
            return None
        payload = tier.view(slot, entry.meta.length)
        try:
            verify(payload, entry.meta, tier.name)
        except CorruptBlock as error:
            with self._lock:
                self._placement.damaged(entry, level, error.cause)
            return None
        return payload

    def _past(self, level: int, batch: Sequence[Entry]) -> None:
        """Write what found no room in the tier below, which may be full of leased blocks, to the cold tier at once."""
        placement = self._placement
        if placement.cold is None or not placement.memory[level].tier.addressable:
            return
        with self._lock:
            stuck = [entry for entry in batch if placement.memory[level].dirty.get(entry.key) is entry]
        if stuck:
            self._note(level, placement.cold_level, self._to_cold(level, stuck))

    def _note(self, level: int, below: int, arrived: Sequence[Entry]) -> None:
        names = self._placement.names
        with self._lock:
            self._state.ledger.demoted(arrived, names[level], names[below])
            if self._state.sharing is not None and below == self._placement.cold_level:
                self._state.sharing.demoted(arrived)

    def _to_cold(self, level: int, batch: Sequence[Entry]) -> list[Entry]:
        cold, index = self._placement.cold, self._index
        assert cold is not None
        items = [(entry, payload) for entry in batch if (payload := self._verified(level, entry)) is not None]
        keys = [entry.key for entry, _ in items]
        with self._lock:
            index.arriving.update(keys)  # one that is deleted meanwhile must not look published when it arrives
        moved: list[Entry] = []
        unwanted: list[bytes] = []
        try:
            for entry, _ in items:
                left = cold.meta(entry.key)
                if left is not None and (left.checksum != entry.meta.checksum or entry.key in index.condemned):
                    cold.delete(entry.key)  # left by a deletion or a put that failed: nobody knows which version
            with self._lock:
                puts = [(entry.key, payload, self._state.coded(entry.meta)) for entry, payload in items]
            outcomes = cold.put_many(puts)
            with self._lock:
                for (entry, _), error in zip(items, outcomes, strict=True):
                    stored = cold.meta(entry.key)
                    if error is not None:
                        self._refused(error)
                        if stored is not None:
                            index.condemned.add(entry.key)
                    elif stored is None:  # made room for others of this batch already
                        self._state.ledger.left_cold(entry.key, entry)
                    elif index.awake(entry.key) is not entry:
                        unwanted.append(entry.key)  # deleted meanwhile
                    else:
                        index.condemned.discard(entry.key)
                        self._placement.mark_cold(entry, stored.checksum)
                        moved.append(entry)
                index.purging.update(unwanted)
        finally:
            with self._lock:
                index.arriving.difference_update(keys)
        if moved:
            self._refused_until, self._refusal = 0.0, ""  # there is room again
        purge(cold, unwanted, self._state)
        self._hold_to_quota(cold, {entry.meta.tenant for entry, _ in items})
        return moved

    def _hold_to_quota(self, cold: Tier, tenants: set[bytes]) -> None:
        """Let tenants that store more than they may lose their oldest blocks."""
        if not isinstance(cold, SupportsQuotas):
            return
        for tenant in tenants:
            quota = self._state.tenants.rules_of(tenant).quotas.get(cold.name)
            if quota is not None and cold.payload_by_tenant().get(tenant, 0) > quota:
                cold.trim(tenant, quota)

    def _refused(self, error: TierKVError) -> None:
        self._counters.refused_demotions[error.slug] += 1
        now = time.monotonic()
        if now >= self._refused_until:
            log.warning("the cold tier refuses blocks: %s", error)
        self._refused_until, self._refusal = now + RETRY_S, error.slug


def purge(cold: Tier, keys: Sequence[bytes], state: State) -> None:
    """Delete blocks that are in the index's `purging` from the cold tier. Blocks.

    Whatever happens they are published no more: those the tier will not delete stay condemned, and its error is raised.
    """
    index = state.index
    done = 0
    try:
        for key in keys:
            cold.delete(key)
            done += 1
    finally:
        with state.lock:
            index.purging.difference_update(keys)
            index.condemned.difference_update(keys[:done])
            index.condemned.update(keys[done:])
