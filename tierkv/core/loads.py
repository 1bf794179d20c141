"""Loads: moving published blocks towards the engine, each at most once at a time, shared by all who want it.

The most urgent load begins first. A load holds no memory until it begins, so that bytes in flight are bounded by the
scheduler; one that nobody wants any more never begins. Workers copy, decode and verify without the engine's lock.

A tier that copies in batches gets the loads of one KV group that are next in the queue at once: one is verified while
the one before is copied. Its blocks are published when all of the batch has arrived, or none of them is. Blocks of the
shared tier are read in batches, too, because of the way there; each is published when it arrives.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from tierkv.core.index import Arrival
from tierkv.core.load import Load, Move
from tierkv.core.scheduler import LoadScheduler
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step, run
from tierkv.errors import CorruptBlock, DeviceError, NotFound, TierKVError
from tierkv.storage.tier import BlockMeta, Slot, SupportsBatches
from tierkv.storage.transfer import copy_block, verified

__all__ = ["Loader"]

log = logging.getLogger(__name__)

SHARED_BATCH = 64 << 20
"""Bytes of blocks of the shared tier that one thread asks for at once."""


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
        kind: tuple[object, ...] | None = None
        far = False
        if isinstance(self._placement.memory[load.level].tier, SupportsBatches):
            entry = self._state.index.awake(load.key)
            kind = (load.level, entry.meta.group if entry is not None else -1)
        elif self._is_shared(self._state.index.levels(load.key)):
            entry = self._state.index.wake(load.key)
            assert entry is not None
            far, kind = True, ("shared", load.level, entry.meta.tenant, entry.meta.namespace)
            self._state.index.rest(entry)
        load.job = self._scheduler.submit(
            lambda: self._work(load, far), load.nbytes, load.deadline, kind=kind, subject=load
        )

    def _work(self, load: Load, far: bool) -> None:
        tier = self._placement.memory[load.level].tier
        loads, arrived = [load], set[Load]()
        try:
            if isinstance(tier, SupportsBatches):
                with self._lock:  # whoever asks for many loads holds it until all of them are in the queue
                    loads += self._next_to(load, tier.batch_bytes)
                self._move_together(loads, tier, arrived)
            elif far:
                with self._lock:
                    loads += self._next_to(load, SHARED_BATCH)
                self._move_from_afar(loads)
            elif self._move(load):
                arrived.add(load)
        except Exception:
            log.exception("a load failed unexpectedly")
        for one in loads:
            if not one.future.done():
                self._finish(one, arrived=one in arrived)

    def _finish(self, load: Load, *, arrived: bool) -> None:
        with self._lock:
            self._forget(load)
            if arrived and load.onward > 0 and load.level > 0:
                self._move_on(load)
        load.future.set_result(arrived)

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
            if move.source == self._placement.shared_level:  # it has left this machine since it was asked for
                self._read_from_afar([move], began)
                return load.future.done() and load.future.result()
            return self._copied(move) and self._arrive(move, began)
        finally:
            self._end(move)

    def _move_from_afar(self, loads: list[Load]) -> None:
        """Load blocks of one tenant and namespace from the shared tier; each is done as soon as it has arrived. Blocks.

        Room is found before anything is asked for; only the first block waits for it.
        """
        moves: list[Move] = []
        try:
            for load in loads:
                move = self._begin(load)
                if isinstance(move, bool):
                    self._finish(load, arrived=move)
                    continue
                moves.append(move)
                move.slot = self._room_at_once(move) if len(moves) > 1 else run(self._find_room(load.level, move.meta))
                if move.slot is None:
                    load.failure = "no_room"
                    self._finish(load, arrived=False)
            began = time.monotonic()
            placed = [move for move in moves if move.slot is not None]
            for move in placed:  # those that have come to this machine meanwhile
                if move.source != self._placement.shared_level:
                    self._finish(move.load, arrived=self._copied(move) and self._arrive(move, began))
            self._read_from_afar([move for move in placed if move.source == self._placement.shared_level], began)
        finally:
            for move in moves:
                self._end(move)

    def _read_from_afar(self, moves: list[Move], began: float) -> None:
        """Fill slots from the shared tier and finish each load as soon as its block has come. Blocks."""
        sharing = self._state.sharing
        if not moves or sharing is None:
            return
        outages = sharing.outages

        def done(position: int, outcome: BlockMeta | TierKVError) -> None:
            move, arrived = moves[position], False
            # What came after an outage took as long as that. Learned, it would keep the tier out of use for minutes.
            move.telling = sharing.outages == outages
            with self._explained(move):
                if isinstance(outcome, TierKVError):
                    raise outcome
                self._identify(move, outcome)
                arrived = self._arrive(move, began)
            self._finish(move.load, arrived=arrived)

        target = self._placement.memory[moves[0].load.level].tier
        sharing.read([(m.entry.key, m.meta, target.view(_slot(m), m.meta.length)) for m in moves], done)

    def _identify(self, move: Move, found: BlockMeta) -> None:
        """Take note of what a block of the shared tier says of itself: of its checksum, and of what is before it."""
        with self._lock:
            if move.entry.meta is move.meta:
                move.meta = move.entry.meta = move.meta._replace(
                    checksum=found.checksum, parent=found.parent, depth=found.depth
                )

    def _is_shared(self, levels: int) -> bool:
        return levels != 0 and levels == self._state.index.shared_bit

    def _move_together(self, loads: list[Load], tier: SupportsBatches, arrived: set[Load]) -> None:
        """Load blocks in one batch; note those that are there in `arrived`. Blocks.

        Only the first waits for room. Where there is none for a later one, it and those after it are put back into the
        queue, and taken out of `loads`.
        """
        if not tier.usable:
            return
        moves: list[Move] = []
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

    def _payloads(self, moves: list[Move]) -> Iterator[tuple[Slot, memoryview]]:
        """Yield the slots of a batch with the verified bytes that they are to be filled with."""
        for move in moves:
            if move.slot is None:
                continue
            with self._explained(move):
                if move.source == self._placement.shared_level:
                    raise NotFound("the block is on another machine, and comes by way of the warm tier")
                if move.source == self._placement.cold_level:
                    payload = memoryview(bytearray(move.meta.length))
                    self._from_cold(move, payload)
                else:
                    payload = verified(self._placement.memory[move.source].tier, move.entry.key, move.meta)
                move.copying = True
            if move.copying:
                yield move.slot, payload

    def _landed(self, moves: list[Move], tier: SupportsBatches) -> Iterator[Move]:
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

    def _begin(self, load: Load) -> Move | bool:
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
            return Move(load, entry, entry.meta, entry.fastest())

    def _arrive(self, move: Move, began: float) -> bool:
        """Publish the copy of a block; say whether it is there."""
        load, entry, meta, level = move.load, move.entry, move.meta, move.load.level
        with self._lock:
            load.ended = time.monotonic()
            if move.telling:
                self._state.delivery_rates.note(move.source, meta.length, began, load.ended)
            if entry.levels >> level & 1:  # demoted from a faster tier meanwhile
                return True
            if not entry.levels or entry.meta is not meta:  # deleted meanwhile, or become a lossy one
                load.failure = "absent"
                return False
            assert move.slot is not None
            entry.levels &= ~self._state.index.shared_bit
            self._placement.settle(entry, level, move.slot)
            self._placement.enlist(entry, level)
            move.slot = None
            if move.source > level:
                entry.arrival = entry.arrival or Arrival(move.source, load.started, load.ended)
                names = self._placement.names
                self._state.ledger.promoted(entry, names[move.source], names[level], load.ended - began)
        return True

    def _end(self, move: Move) -> None:
        """Give back the slot of a block that has not arrived, and the pin."""
        with self._lock:
            if move.slot is not None:
                self._placement.discard(move.load.level, move.slot, move.meta.tenant)
            self._placement.unpin(move.entry)

    @contextmanager
    def _explained(self, move: Move) -> Iterator[None]:
        """Note why a block cannot be copied from where it lies, and remove a copy that is damaged or not there."""
        load, entry = move.load, move.entry
        try:
            yield
        except CorruptBlock as error:
            load.failure, load.cause = "corrupt", error.cause
            with self._lock:
                if entry.meta is move.meta:  # else the exact copy is gone, and its memory not this block's
                    self._placement.damaged(entry, move.source, error.cause)
                self._note_absent(move)
        except NotFound:
            load.failure = "absent"
            with self._lock:
                self._note_absent(move)
                if entry.levels >> move.source & 1:
                    self._placement.lost_level(entry, move.source, "evicted")
        except TierKVError:
            load.failure = "failed"

    def _note_absent(self, move: Move) -> None:
        if move.source == self._placement.shared_level and self._state.sharing is not None:
            self._state.sharing.knowledge.note_absent(move.entry.key)

    def _put_back(self, loads: Sequence[Load]) -> None:
        with self._lock:
            for load in loads:
                # In their order, and before those of other groups that were behind them.
                load.deadline = math.nextafter(load.deadline, -math.inf)
                self._submit(load)

    def _forget(self, load: Load) -> None:
        if self._running.get((load.key, load.level)) is load:
            del self._running[load.key, load.level]

    def _room_at_once(self, move: Move) -> Slot | None:
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

    def _copied(self, move: Move) -> bool:
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

    def _give_up_copy(self, move: Move) -> bool:
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

    def _from_cold(self, move: Move, out: memoryview) -> None:
        cold = self._placement.cold
        assert cold is not None
        found = cold.read_into(move.entry.key, out)
        if (found.length, found.checksum) != (move.meta.length, move.meta.checksum):
            raise NotFound("the cold tier holds another version of the block")


def _slot(move: Move) -> Slot:
    assert move.slot is not None
    return move.slot
