"""Loads: moving published blocks towards the engine, each at most once at a time, shared by all who want it.

The most urgent load begins first. A load holds no memory until it begins, so that bytes in flight are bounded by the
scheduler; one that nobody wants any more never begins. Workers copy, decode and verify without the engine's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tierkv.core.index import Arrival
from tierkv.core.scheduler import Job, LoadScheduler
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step, run
from tierkv.errors import CorruptBlock, NotFound, TierKVError
from tierkv.storage.tier import BlockMeta, Slot
from tierkv.storage.transfer import copy_block

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
        Promote to the next faster tier as well once it has arrived.
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
    onward: bool = False
    started: float = 0.0
    ended: float = 0.0
    failure: str = "failed"
    cause: str = ""
    job: Job | None = None


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
            load.onward |= onward
            if deadline < load.deadline and load.job is not None:
                load.deadline = deadline
                self._scheduler.hasten(load.job, deadline)
            return load
        load = Load(key, nbytes, level, deadline, onward=onward)
        if self._closed:
            load.future.set_result(False)
            return load
        self._running[key, level] = load
        load.job = self._scheduler.submit(lambda: self._work(load), nbytes, deadline)
        return load

    def unwant(self, load: Load) -> None:
        """Say that one request no longer wants a load."""
        load.wanted -= 1
        if not load.wanted and load.job is not None and self._scheduler.cancel(load.job):
            load.failure = "cancelled"
            self._forget(load)
            load.future.set_result(False)

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

    def _work(self, load: Load) -> None:
        arrived = False
        try:
            arrived = self._move(load)
        except Exception:
            log.exception("a load failed unexpectedly")
        with self._lock:
            self._forget(load)
            if arrived and load.onward and load.level > 0:
                self.want(load.key, load.nbytes, load.level - 1, load.deadline)
        load.future.set_result(arrived)

    def _move(self, load: Load) -> bool:
        level = load.level
        with self._lock:
            entry = self._state.index.wake(load.key) if load.wanted else None
            if entry is None:
                load.failure = "absent" if load.wanted else "cancelled"
                self._forget(load)  # at once: nobody may join a load that does not begin
                return False
            if entry.levels >> level & 1:
                return True
            source = entry.fastest()
            entry.pins += 1
            load.started = time.monotonic()
        slot: Slot | None = None
        try:
            slot = run(self._find_room(level, entry.meta))
            if slot is None:
                load.failure = "no_room"
                return False
            meta = entry.meta
            began = time.monotonic()
            self._fill(entry.key, meta, source, level, slot)
            with self._lock:
                load.ended = time.monotonic()
                self._state.delivery_rates.note(source, meta.length, began, load.ended)
                if entry.levels >> level & 1:  # demoted from a faster tier meanwhile
                    return True
                if not entry.levels or entry.meta is not meta:  # deleted meanwhile, or become a lossy one
                    load.failure = "absent"
                    return False
                self._placement.settle(entry, level, slot)
                self._placement.enlist(entry, level)
                slot = None
                if source > level:
                    entry.arrival = entry.arrival or Arrival(source, load.started, load.ended)
                    names = self._placement.names
                    self._state.ledger.promoted(entry, names[source], names[level], load.ended - began)
            return True
        except CorruptBlock as error:
            load.failure, load.cause = "corrupt", error.cause
            with self._lock:
                if entry.meta is meta:  # else the exact copy is gone, and its memory not this block's
                    self._placement.damaged(entry, source, error.cause)
            return False
        except NotFound:
            load.failure = "absent"
            with self._lock:
                if entry.levels >> source & 1:
                    self._placement.lost_level(entry, source, "evicted")
            return False
        except TierKVError:
            load.failure = "failed"
            return False
        finally:
            with self._lock:
                if slot is not None:
                    self._placement.discard(level, slot, entry.meta.tenant)
                self._placement.unpin(entry)

    def _forget(self, load: Load) -> None:
        if self._running.get((load.key, load.level)) is load:
            del self._running[load.key, load.level]

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

    def _fill(self, key: bytes, meta: BlockMeta, source: int, level: int, slot: Slot) -> None:
        """Copy a block's verified bytes into a slot of a memory tier."""
        placement = self._placement
        target = placement.memory[level].tier
        if source != placement.cold_level:
            copy_block(placement.memory[source].tier, target, key, slot, meta)
            return
        assert placement.cold is not None
        found = placement.cold.read_into(key, target.view(slot, meta.length))
        if (found.length, found.checksum) != (meta.length, meta.checksum):
            raise NotFound("the cold tier holds another version of the block")
