"""Operations that may have to wait, written once for threads and for asyncio.

A step is a generator: it yields a `Pause` when it cannot go on before some futures are done or a deadline has passed,
and returns its result. `run` drives it by blocking the thread, `run_async` by awaiting. Closing an unfinished step
(a cancelled task, a vanished client) runs its ``finally`` clauses, which give back what it held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Generator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Pause", "Step", "run", "run_async"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait until all `futures` are done, at most until `deadline` on the monotonic clock (seconds; inf: no limit)."""

    futures: Collection[Future[Any]]
    deadline: float

    def remaining(self) -> float | None:
        """Seconds left, None for no limit."""
        return None if self.deadline == float("inf") else max(0.0, self.deadline - time.monotonic())


Step = Generator[Pause, None, T]


def run(step: Step[T]) -> T:
    """Drive a step to its result, blocking this thread while it pauses."""
    with closing(step):
        while True:
            try:
                pause = next(step)
            except StopIteration as end:
                result: T = end.value
                return result
            wait(pause.futures, timeout=pause.remaining())


async def run_async(step: Step[T]) -> T:
    """Drive a step to its result without blocking the event loop."""
    with closing(step):
        while True:
            try:
                pause = next(step)
            except StopIteration as end:
                result: T = end.value
                return result
            if pause.futures:
                # wrap_future cancels its source when the task is cancelled; loads are shared, so shield them.
                waiting = [asyncio.shield(asyncio.wrap_future(future)) for future in pause.futures]
                await asyncio.wait(waiting, timeout=pause.remaining())
