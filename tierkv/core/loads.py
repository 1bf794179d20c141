"""Loads: moving published blocks towards the engine, each at most once at a time, shared by all who want it.

The most urgent load begins first. A load holds no memory until it begins, so that bytes in flight are bounded by the
scheduler; one that nobody wants any more never begins. Workers copy, decode and verify without the engine's lock.

A tier that copies in batches gets the loads of one KV group that are next in the queue at once: one is verified while
the one before is copied. Its blocks are published when all of the batch has arrived, or none of them is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierkv.core.index import Arrival, Entry
from tierkv.core.scheduler import Job, LoadScheduler
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step, run
from tierkv.errors import CorruptBlock, DeviceError, NotFound, TierKVError
from tierkv.storage.tier import BlockMeta, Slot, SupportsBatches
from tierkv.storage.transfer import copy_block, verified

__all__ = ["Load", "Loader"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """One block on its way to a memory tier.

    Attributes
    ----------
    nbytes
        Size of the block.
    deadline
        When the most urgent of those who want it wants it, on the monotonic clock (seconds).
    future
        Done when the load is; True when the block arrived. Never carries an exception.
    wanted
        Requests and tickets that still want it; a load nobody wants does not begin.
    onward
        Those of them who want the block in the next faster tier as well, once it has arrived.
    then
        The load that moves it on.
    started, ended
        Monotonic seconds; 0 before.
    failure
        Why it did not arrive: a label of `Counters.missed_blocks`.
    cause
        What was found wrong with a copy that is corrupt: `CorruptBlock.cause`.
    """

    key: bytes
    nbytes: int
    level: int
    deadline: float
    future: Future[bool] = field(default_factory=Future)
    wanted: int = 1
    onward: int = 0
    then: Load | None = None
    started: float = 0.0
    ended: float = 0.0
    failure: str = "failed"
    cause: str = ""
    job: Job | None = None

    def last(self) -> Load:
        """Return the load that brings the block as far as it is to go, as far as that has begun."""
        load = self
        while load.then is not None:
            load = load.then
        return load


@dataclass(slots=True, eq=False)
class _Move:
    """A load that has begun: the block, the level it comes from, and the slot it goes to."""

    load: Load
    entry: Entry
    meta: BlockMeta
    source: int
    slot: Slot | None = None
    copying: bool = False


class Loader:
    """Runs loads on a small pool of threads.

    Parameters
    ----------
    state
        The engine's. `want` and `unwant` are called with its lock held; workers take it themselves.
    room
        Asks for room in the memory tiers, with the lock held; returns a future that is done when there may be some.
    threads, bytes_in_flight
        Bounds on the loads that run at once.
    room_wait_s
        How long a worker waits for room before its load fails, in seconds; for as long again, others fail at once.
    """

    def __init__(
        self,
        state: State,
        room: Callable[[], Future[None]],
        *,
        threads: int,
        bytes_in_flight: int,
        room_wait_s: float,
    ) -> None:
        self._state = state
        self._placement = state.placement
        self._lock = state.lock
        self._room = room
        self._room_wait_s = room_wait_s
        self._scheduler = LoadScheduler(threads, bytes_in_flight)
        self._running: dict[tuple[bytes, int], Load] = {}
        self._closed = False
        self._no_room_until = 0.0

    def want(self, key: bytes, nbytes: int, level: int, deadline: float, *, onward: bool = False) -> Load:
        """Join or start the load of a block into a memory tier. Every call is paired with one `unwant`."""
        load = self._running.get((key, level))
        if load is not None:
            load.wanted += 1
            load.onward += onward
            if deadline < load.deadline and load.job is not None:
                load.deadline = deadline
                self._scheduler.hasten(load.job, deadline)
            return load
        load = Load(key, nbytes, level, deadline, onward=int(onward))
        self._submit(load)
        return load

    def unwant(self, load: Load, *, onward: bool = False) -> None:
        """Say that one request no longer wants a load; `onward` as it was said in `want`."""
        load.wanted -= 1
        load.onward -= onward
        if not load.wanted and load.job is not None and self._scheduler.cancel(load.job):
            load.failure = "cancelled"
            self._forget(load)
            load.future.set_result(False)
        if onward and load.then is not None:
            self.unwant(load.then)

    def bound(self, bytes_in_flight: int) -> None:
        """Let so many bytes be in flight from now on."""
        self._scheduler.bound(bytes_in_flight)

    def try_again(self) -> None:
        """Let loads wait for room again: somebody who found none has made way (with the lock held)."""
        self._no_room_until = 0.0

    def to_dict(self) -> dict[str, int]:
        """What is under way and what waits, for stats."""
        scheduler = self._scheduler
        return {
            "queued": scheduler.queued,
            "waiting_bytes": scheduler.waiting_bytes,
            "running_bytes": scheduler.running_bytes,
        }

    def close(self) -> None:
        """Let running loads end and start no more. Blocks."""
        with self._lock:
            self._closed = True
        self._scheduler.close()
        with self._lock:
            rest = list(self._running.values())
            self._running.clear()
        for load in rest:
            if not load.future.done():
                load.future.set_result(False)

    def _submit(self, load: Load) -> None:
        if self._closed:
            load.future.set_result(False)
            return
        self._running[load.key, load.level] = load
        kind: tuple[int, int] | None = None
        if isinstance(self._placement.memory[load.level].tier, SupportsBatches):
            entry = self._state.index.awake(load.key)
            kind = (load.level, entry.meta.group if entry is not None else -1)
        load.job = self._scheduler.submit(lambda: self._work(load), load.nbytes, load.deadline, kind=kind, subject=load)

    def _work(self, load: Load) -> None:
        tier = self._placement.memory[load.level].tier
        loads, arrived = [load], set[Load]()
        try:
            if isinstance(tier, SupportsBatches):
                with self._lock:  # whoever asks for many loads holds it until all of them are in the queue
                    loads += self._next_to(load, tier.batch_bytes)
                self._move_together(loads, tier, arrived)
            elif self._move(load):
                arrived.add(load)
        except Exception:
            log.exception("a load failed unexpectedly")
        with self._lock:
            for one in loads:
                self._forget(one)
                if one in arrived and one.onward > 0 and one.level > 0:
                    self._move_on(one)
        for one in loads:
            one.future.set_result(one in arrived)

    def _next_to(self, load: Load, most_bytes: int) -> list[Load]:
        assert load.job is not None
        jobs = self._scheduler.take_along(load.job, most_bytes)
        return [job.subject for job in jobs if isinstance(job.subject, Load)]

    def _move_on(self, load: Load) -> None:
        # Before blocks that are on the disk and wanted at the same time: the layers of the first groups come first.
        load.then = self.want(load.key, load.nbytes, load.level - 1, math.nextafter(load.deadline, -math.inf))
        load.then.wanted += load.onward - 1

    def _move(self, load: Load) -> bool:
        """Load one block; say whether it is there. Blocks."""
        move = self._begin(load)
        if isinstance(move, bool):
            return move
        try:
            move.slot = run(self._find_room(load.level, move.meta))
            if move.slot is None:
                load.failure = "no_room"
                return False
            began = time.monotonic()
            return self._copied(move) and self._arrive(move, began)
        finally:
            self._end(move)

    def _move_together(self, loads: list[Load], tier: SupportsBatches, arrived: set[Load]) -> None:
        """Load blocks in one batch; note those that are there in `arrived`. Blocks.

        Only the first waits for room. Where there is none for a later one, it and those after it are put back into the
        queue, and taken out of `loads`.
        """
        if not tier.usable:
            return
        moves: list[_Move] = []
        try:
            for position, load in enumerate(loads):
                move = self._begin(load)
                if isinstance(move, bool):
                    arrived.update([load] if move else [])
                    continue
                moves.append(move)
                move.slot = self._room_at_once(move) if position else run(self._find_room(load.level, move.meta))
                if move.slot is None and position:
                    self._put_back(loads[position:])
                    del loads[position:]
                    break
                if move.slot is None:
                    load.failure = "no_room"
            began = time.monotonic()
            tier.copy_in(self._payloads(moves)).wait()
            for move in self._landed(moves, tier):
                if self._arrive(move, began):
                    arrived.add(move.load)
        except DeviceError as error:
            log.warning("%d blocks have not arrived: %s", len(moves), error)
        finally:
            for move in moves:
                self._end(move)

    def _payloads(self, moves: list[_Move]) -> Iterator[tuple[Slot, memoryview]]:
        """Yield the slots of a batch with the verified bytes that they are to be filled with."""
        for move in moves:
            if move.slot is None:
                continue
            with self._explained(move):
                if move.source == self._placement.cold_level:
                    payload = memoryview(bytearray(move.meta.length))
                    self._from_cold(move, payload)
                else:
                    payload = verified(self._placement.memory[move.source].tier, move.entry.key, move.meta)
                move.copying = True
            if move.copying:
                yield move.slot, payload

    def _landed(self, moves: list[_Move], tier: SupportsBatches) -> Iterator[_Move]:
        """Yield what was copied and is not known to have changed on its way, the tail of a chain before its head."""
        copied = [(move, move.slot) for move in moves if move.slot is not None and move.copying]
        sums = tier.landed([(slot, move.meta.length) for move, slot in copied])
        for (move, _), found in reversed(list(zip(copied, sums, strict=True))):
            if found is None or found == move.meta.checksum:
                yield move
                continue
            move.load.failure, move.load.cause = "corrupt", "transfer"
            with self._lock:
                self._state.ledger.corrupt(move.entry, self._placement.names[move.load.level], "transfer")

    def _begin(self, load: Load) -> _Move | bool:
        """Pin the block of a load; or say whether it is there, if there is nothing to be done."""
        with self._lock:
            entry = self._state.index.wake(load.key) if load.wanted else None
            if entry is None:
                load.failure = "absent" if load.wanted else "cancelled"
                self._forget(load)  # at once: nobody may join a load that does not begin
                return False
            if entry.levels >> load.level & 1:
                return True
            entry.pins += 1
            load.started = time.monotonic()
            return _Move(load, entry, entry.meta, entry.fastest())

    def _arrive(self, move: _Move, began: float) -> bool:
        """Publish the copy of a block; say whether it is there."""
        load, entry, meta, level = move.load, move.entry, move.meta, move.load.level
        with self._lock:
            load.ended = time.monotonic()
            self._state.delivery_rates.note(move.source, meta.length, began, load.ended)
            if entry.levels >> level & 1:  # demoted from a faster tier meanwhile
                return True
            if not entry.levels or entry.meta is not meta:  # deleted meanwhile, or become a lossy one
                load.failure = "absent"
                return False
            assert move.slot is not None
            self._placement.settle(entry, level, move.slot)
            self._placement.enlist(entry, level)
            move.slot = None
            if move.source > level:
                entry.arrival = entry.arrival or Arrival(move.source, load.started, load.ended)
                names = self._placement.names
                self._state.ledger.promoted(entry, names[move.source], names[level], load.ended - began)
        return True

    def _end(self, move: _Move) -> None:
        """Give back the slot of a block that has not arrived, and the pin."""
        with self._lock:
            if move.slot is not None:
                self._placement.discard(move.load.level, move.slot, move.meta.tenant)
            self._placement.unpin(move.entry)

    @contextmanager
    def _explained(self, move: _Move) -> Iterator[None]:
        """Note why a block cannot be copied from where it lies, and remove a copy that is damaged or not there."""
        load, entry = move.load, move.entry
        try:
            yield
        except CorruptBlock as error:
            load.failure, load.cause = "corrupt", error.cause
            with self._lock:
                if entry.meta is move.meta:  # else the exact copy is gone, and its memory not this block's
                    self._placement.damaged(entry, move.source, error.cause)
        except NotFound:
            load.failure = "absent"
            with self._lock:
                if entry.levels >> move.source & 1:
                    self._placement.lost_level(entry, move.source, "evicted")
        except TierKVError:
            load.failure = "failed"

    def _put_back(self, loads: Sequence[Load]) -> None:
        with self._lock:
            for load in loads:
                # In their order, and before those of other groups that were behind them.
                load.deadline = math.nextafter(load.deadline, -math.inf)
                self._submit(load)

    def _forget(self, load: Load) -> None:
        if self._running.get((load.key, load.level)) is load:
            del self._running[load.key, load.level]

    def _room_at_once(self, move: _Move) -> Slot | None:
        with self._lock:
            return self._placement.allocate(move.load.level, move.meta.length, move.meta.tenant)

    def _find_room(self, level: int, meta: BlockMeta) -> Step[Slot | None]:
        now = time.monotonic()
        deadline = now if now < self._no_room_until else now + self._room_wait_s
        while True:
            with self._lock:
                slot = self._placement.allocate(level, meta.length, meta.tenant)
                if slot is not None:
                    return slot
                if time.monotonic() >= deadline:
                    self._no_room_until = time.monotonic() + self._room_wait_s
                    return None
                room = self._room()
            yield Pause([room], deadline)

    def _copied(self, move: _Move) -> bool:
        """Copy a block's verified bytes into its slot of a memory tier; say whether that went well. Blocks."""
        placement, copied = self._placement, False
        target = placement.memory[move.load.level].tier
        assert move.slot is not None
        with self._explained(move):
            while move.source != placement.cold_level and not copied:
                source = placement.memory[move.source].tier
                try:
                    copy_block(source, target, move.entry.key, move.slot, move.meta)
                    copied = True
                except DeviceError:
                    if not self._give_up_copy(move):
                        raise
            if not copied:
                self._from_cold(move, target.view(move.slot, move.meta.length))
            copied = True
        return copied

    def _give_up_copy(self, move: _Move) -> bool:
        """Go on with a slower tier's copy of a block that a device does not give back; say whether there is one."""
        with self._lock:
            below = move.entry.levels >> (move.source + 1) << (move.source + 1)
            tier = self._placement.memory[move.source].tier
            if below or not (isinstance(tier, SupportsBatches) and tier.usable):
                self._placement.damaged(move.entry, move.source, "device")
            if below and move.entry.meta is move.meta:
                move.source = (below & -below).bit_length() - 1
                return True
        return False

    def _from_cold(self, move: _Move, out: memoryview) -> None:
        cold = self._placement.cold
        assert cold is not None
        found = cold.read_into(move.entry.key, out)
        if (found.length, found.checksum) != (move.meta.length, move.meta.checksum):
            raise NotFound("the cold tier holds another version of the block")
