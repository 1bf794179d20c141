"""One block on its way to a memory tier."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from tierkv.core.index import Entry
from tierkv.core.scheduler import Job
from tierkv.storage.tier import BlockMeta, Slot

__all__ = ["Load", "Move"]


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
class Move:
    """A load that has begun: the block, the level it comes from, and the slot it goes to.

    `telling`: its time says something of how fast that level is.
    """

    load: Load
    entry: Entry
    meta: BlockMeta
    source: int
    slot: Slot | None = None
    copying: bool = False
    telling: bool = True
