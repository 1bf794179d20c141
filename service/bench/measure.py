"""Timing: interleaved repeats, medians. A shared machine is noisy, and what is compared must meet the same noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from statistics import median

import numpy as np
from numpy.typing import NDArray

__all__ = ["gbps", "in_two_threads", "interleaved", "memcpy", "seconds"]

Work = Callable[[], object]


def seconds(work: Work, times: int = 1) -> float:
    """Return how long `work` takes, the mean of some `times` in a row. Blocks."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def interleaved(works: Mapping[str, Work], *, rounds: int, at_least_s: float = 0.0) -> dict[str, float]:
    """Time each work in turn, `rounds` times over and once before to warm up; return the median seconds. Blocks.

    A work that is done sooner than `at_least_s` is repeated until then: in a few milliseconds two threads may not have
    left the core that woke them.
    """
    repeats = {name: max(1, ceil(at_least_s / max(1e-9, seconds(work)))) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, repeats[name]))
    return {name: median(times) for name, times in taken.items()}


def gbps(nbytes: int, taken: float) -> float:
    """Return a speed in GB (1e9 bytes) per second."""
    return nbytes / taken / 1e9


def memcpy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> Work:
    """Return the yardstick: numpy copying blocks, ``[blocks, bytes]``, one by one."""

    def copy() -> None:
        for row in range(len(source)):
            np.copyto(target[row], source[row])

    return copy


def in_two_threads(pool: ThreadPoolExecutor, work: Callable[[int], object]) -> Work:
    """Return work that runs ``work(0)`` and ``work(1)`` at the same time."""

    def run() -> None:
        list(pool.map(work, (0, 1)))

    return run
