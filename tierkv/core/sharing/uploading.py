"""Offering blocks to other machines: what is to be written to the shared tier, in the order and at the rate it bears.

Blocks wait here by key only. When it is their turn they are taken from the cold tier as they are coded there, else from
memory; one that has left both is skipped. What the shared tier has already, from whomever, is not written again, and
nothing is written where computing a block is known to be faster than fetching it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Thread
from typing import TYPE_CHECKING

from tierkv.core.index import Entry
from tierkv.core.sharing.counts import SharedCounts
from tierkv.core.sharing.knowledge import Knowledge
from tierkv.core.state import State
from tierkv.errors import ChecksumMismatch, NotFound, TierKVError, Unavailable
from tierkv.storage.tier import BlockMeta, Buffer, SupportsContainers

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore, SharedTier

__all__ = ["Uploader"]

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
MOST_WAITING = 1 << 17
AWAY_S = 1.0
"""How long the queue rests when the tier does not take blocks."""


class Uploader:
    """Writes published blocks to the shared tier, on a thread of its own.

    Parameters
    ----------
    bytes_per_s
        Most bytes of payload a second; None: no bound.
    """

    def __init__(
        self, state: State, store: SharedStore, knowledge: Knowledge, counts: SharedCounts, bytes_per_s: float | None
    ) -> None:
        self._state = state
        self._store = store
        self._knowledge = knowledge
        self._counts = counts
        self._bytes_per_s = bytes_per_s
        self._changed = Condition(state.lock)
        self._waiting: OrderedDict[bytes, BlockMeta] = OrderedDict()
        self._in_hand = 0
        self._offered = 0
        self._after: deque[tuple[int, Callable[[], None]]] = deque()
        self._closed = False
        self._free_at = 0.0
        self._thread = Thread(target=self._work, name="tierkv-upload", daemon=True)
        self._thread.start()

    def offer(self, entries: Iterable[Entry]) -> None:
        """Have blocks written, unless the tier is known to have them (with the lock held)."""
        for entry in entries:
            if entry.key not in self._waiting and self._knowledge.meta(entry.key) is None:
                self._waiting[entry.key] = entry.meta
                self._offered += 1
        while len(self._waiting) > MOST_WAITING:  # those that waited longest are the least likely to be still here
            self._waiting.popitem(last=False)
            self._counts.skipped["too_many"] += 1
        self._changed.notify()

    def then(self, what: Callable[[], None]) -> None:
        """Call `what` as soon as everything offered so far has been dealt with; the lock is held now and then."""
        self._after.append((self._offered, what))
        self._call_those_after()

    def waiting(self) -> int:
        """Return how many blocks wait to be written (with the lock held)."""
        return len(self._waiting)

    def drain(self, wait_s: float) -> bool:
        """Wait until everything offered so far has been dealt with; say whether it was in time. Blocks."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while (self._waiting or self._in_hand) and not self._closed:
                if time.monotonic() >= deadline or not self._store.available:
                    return False
                self._changed.wait(min(0.05, deadline - time.monotonic()))
        return True

    def close(self) -> None:
        """Finish the batch at hand and write no more. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._in_hand = 0
                self._call_those_after()
                self._changed.notify_all()
                while not self._closed and not self._waiting:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._next_batch()
                self._in_hand = len(batch)
            try:
                self._write(batch)
            except Unavailable as error:
                log.debug("the shared tier takes no blocks: %s", error)
                self._rest(batch)
            except TierKVError as error:
                log.warning("blocks were not shared: %s", error)
                self._count_skipped("failed", len(batch))
            except Exception:
                log.exception("sharing blocks failed unexpectedly")

    def _call_those_after(self) -> None:
        dealt_with = self._offered - len(self._waiting) - self._in_hand  # they are, in the order of the offers
        while self._after and self._after[0][0] <= dealt_with:
            self._after.popleft()[1]()

    def _next_batch(self) -> list[tuple[bytes, BlockMeta]]:
        """Take the longest waiting blocks of one area, the heads of chains first."""
        batch: list[tuple[bytes, BlockMeta]] = []
        size = 0
        for key, meta in self._waiting.items():
            if batch and (
                size + meta.length > BATCH_BYTES
                or (meta.tenant, meta.namespace) != (batch[0][1].tenant, batch[0][1].namespace)
            ):
                break
            batch.append((key, meta))
            size += meta.length
        for key, _ in batch:
            del self._waiting[key]
        return sorted(batch, key=lambda item: item[1].depth)

    def _rest(self, batch: Sequence[tuple[bytes, BlockMeta]]) -> None:
        """Put a batch back and wait for the tier to come back."""
        with self._changed:
            for key, meta in reversed(batch):
                self._waiting.setdefault(key, meta)
                self._waiting.move_to_end(key, last=False)
            self._in_hand = 0
            until = time.monotonic() + AWAY_S
            while not self._closed and (left := until - time.monotonic()) > 0.0:  # whatever is offered meanwhile
                self._changed.wait(left)

    def _write(self, batch: Sequence[tuple[bytes, BlockMeta]]) -> None:
        meta = batch[0][1]
        if not self._worth_fetching(meta):
            self._count_skipped("cheaper_computed", len(batch))
            return
        self._await_turn()  # before it is asked what is there: in a while others may have written it
        area = self._store.area(meta.tenant, meta.namespace)
        held = area.held([key for key, _ in batch])
        missing = [item for item, there in zip(batch, held, strict=True) if not there]
        with self._state.lock:
            self._know([item for item, there in zip(batch, held, strict=True) if there])
        self._use_turn(sum(meta.length for _, meta in missing))
        rest = self._from_cold(area, missing)
        self._from_memory(area, rest)

    def _worth_fetching(self, meta: BlockMeta) -> bool:
        """Say whether blocks like this one are of use elsewhere, as far as this machine can tell from its own.

        What is known of the tier's speed fades within minutes, and then it gets another chance.
        """
        state = self._state
        with state.lock:
            info = state.namespaces.get(meta.namespace.hex())
            rate = state.prefill_rates.tokens_per_s(info.name) if info is not None else None
            found = state.delivery_rates.estimate(state.placement.shared_level, meta.length, time.monotonic())
        if info is None or rate is None or found is None:
            return True
        return found.seconds_per_block < info.spec.block_tokens / rate

    def _await_turn(self) -> None:
        """Wait until more may be written."""
        with self._changed:
            while not self._closed and (left := self._free_at - time.monotonic()) > 0.0:
                self._changed.wait(left)

    def _use_turn(self, nbytes: int) -> None:
        if self._bytes_per_s is not None:
            self._free_at = time.monotonic() + nbytes / self._bytes_per_s

    def _from_cold(self, area: SharedTier, batch: Sequence[tuple[bytes, BlockMeta]]) -> list[tuple[bytes, BlockMeta]]:
        """Copy what the cold tier has, as it is coded there; return the rest."""
        cold = self._state.placement.cold
        if cold is None or not isinstance(cold, SupportsContainers):
            return list(batch)
        items: list[tuple[bytes, Buffer, BlockMeta]] = []
        rest: list[tuple[bytes, BlockMeta]] = []
        for key, meta in batch:
            with self._state.lock:
                hidden = key in self._state.index.purging or key in self._state.index.condemned
            try:
                if hidden or not cold.has(key):
                    raise NotFound("not there")
                container, stored = cold.read_container(key)
                items.append((key, container, stored))
            except TierKVError:
                rest.append((key, meta))
        self._note(area, items, area.put_containers(items, missing=True))
        return rest

    def _from_memory(self, area: SharedTier, batch: Sequence[tuple[bytes, BlockMeta]]) -> None:
        """Code and write what memory has."""
        state, placement = self._state, self._state.placement
        pinned: list[tuple[Entry, int]] = []
        items: list[tuple[bytes, Buffer, BlockMeta]] = []
        try:
            with state.lock:
                for key, _ in batch:
                    entry = state.index.awake(key)
                    level = self._readable(entry) if entry is not None else None
                    slot = placement.memory[level].tier.slot(key) if level is not None else None
                    if entry is None or level is None or slot is None:
                        self._counts.skipped["gone"] += 1
                        continue
                    entry.pins += 1
                    pinned.append((entry, level))
                    view = placement.memory[level].tier.view(slot, entry.meta.length)
                    items.append((key, view, state.coded(entry.meta)))
            outcomes = area.put_many(items, missing=True)
            with state.lock:
                for (entry, level), outcome in zip(pinned, outcomes, strict=True):
                    if isinstance(outcome, ChecksumMismatch):
                        placement.damaged(entry, level, "checksum")
            self._note(area, items, outcomes)
        finally:
            with state.lock:
                for entry, _ in pinned:
                    placement.unpin(entry)

    def _readable(self, entry: Entry) -> int | None:
        """Return the level of a copy that this process can read in place."""
        levels = range(len(self._state.placement.memory))
        memory = self._state.placement.memory
        return next((n for n in levels if entry.levels >> n & 1 and memory[n].tier.addressable), None)

    def _note(
        self,
        area: SharedTier,
        items: Sequence[tuple[bytes, Buffer, BlockMeta]],
        outcomes: Sequence[TierKVError | None],
    ) -> None:
        away: Unavailable | None = None
        unwanted: list[bytes] = []
        with self._state.lock:
            for (key, _, meta), outcome in zip(items, outcomes, strict=True):
                if isinstance(outcome, Unavailable):
                    away = outcome
                elif outcome is not None:
                    self._counts.skipped[outcome.slug] += 1
                elif not self._state.index.here(key) and self._state.ledger.lost.reason(key) in ("deleted", "cleared"):
                    unwanted.append(key)  # meanwhile: it must not come back from there
                else:
                    self._know([(key, meta)])
                    self._counts.uploaded_blocks += 1
                    self._counts.uploaded_bytes += meta.length
        for key in unwanted:
            area.delete(key)
        if away is not None:
            raise away

    def _know(self, items: Iterable[tuple[bytes, BlockMeta]]) -> None:
        self._knowledge.note_held((key, meta._replace(checksum=0)) for key, meta in items)

    def _count_skipped(self, reason: str, blocks: int) -> None:
        with self._state.lock:
            self._counts.skipped[reason] += blocks
