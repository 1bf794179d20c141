"""A pool of threads that runs loads by deadline, within a bound of bytes in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Condition, Lock, Thread, current_thread
from typing import Literal

from tierkv.errors import Unavailable

__all__ = ["Job", "LoadScheduler"]

log = logging.getLogger(__name__)

_FEW = 64


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work handed to a `LoadScheduler`, which alone changes it.

    Attributes
    ----------
    run
        The work. Called once by a worker, or never.
    nbytes
        Bytes it holds while it runs.
    deadline
        Monotonic seconds; only its order among others matters.
    kind, subject
        For `LoadScheduler.take_along`: jobs of one kind, if it is not None, can be done together; what it is about.
    """

    run: Callable[[], None]
    nbytes: int
    deadline: float
    kind: object
    subject: object
    _number: int = field(repr=False)
    _state: Literal["queued", "begun", "cancelled"] = "queued"


class LoadScheduler:
    """Runs the job with the earliest deadline first, among equals the first submitted.

    A job begins when a thread is free and the bytes of all running jobs stay within the bound. One that is larger than
    the bound runs alone. Later jobs never overtake one that has to wait for bytes, or large blocks would starve.

    Callers may hold locks of their own during `submit`, `hasten` and `cancel`, which never wait for a job; the
    scheduler holds no lock while a job runs.

    Parameters
    ----------
    threads
        Jobs that may run at once.
    max_bytes
        Bytes that may be in flight at once.
    name
        Prefix of the threads' names.
    """

    def __init__(self, threads: int, max_bytes: int, *, name: str = "tierkv-load") -> None:
        self._max_bytes = max_bytes
        self._changed = Condition(Lock())
        # One entry per submission and per earlier deadline; the one that bears its queued job's deadline is the valid.
        self._heap: list[tuple[float, int, Job]] = []
        self._submitted = 0
        self._queued = 0
        self._running = 0
        self._waiting_bytes = 0
        self._running_bytes = 0
        self._closed = False
        # Daemons: a cache that nobody closed must not keep its process alive.
        self._threads = [Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        """Jobs that have not begun."""
        return self._queued

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the jobs that have not begun."""
        return self._waiting_bytes

    @property
    def running_bytes(self) -> int:
        """Bytes of the jobs that are running."""
        return self._running_bytes

    def submit(
        self,
        run: Callable[[], None],
        nbytes: int,
        deadline: float,
        *,
        kind: object = None,
        subject: object = None,
    ) -> Job:
        """Queue a job. Does not wait. Raises `Unavailable` after `close`."""
        with self._changed:
            if self._closed:
                raise Unavailable("the load scheduler is closed")
            self._submitted += 1
            job = Job(run, nbytes, deadline, kind, subject, self._submitted)
            heappush(self._heap, (deadline, job._number, job))
            self._queued += 1
            self._waiting_bytes += nbytes
            self._changed.notify()
            return job

    def take_along(self, job: Job, most_bytes: int) -> list[Job]:
        """Take those that come next out of the queue, for a running job that does them together with its own work.

        As long as they are of its kind, it holds no more than `most_bytes` with them, and they might have begun now.
        They have begun, are not run, and end with it. Does not wait.
        """
        taken: list[Job] = []
        with self._changed:
            while (
                job.kind is not None
                and (following := self._head()) is not None
                and following.kind == job.kind
                and job.nbytes + following.nbytes <= most_bytes
                and self._fits(following)
            ):
                self._dequeue(following)
                self._running_bytes += following.nbytes
                job.nbytes += following.nbytes
                taken.append(following)
            if taken:
                self._changed.notify()  # what is first in the queue now may fit a thread that waits
        return taken

    def bound(self, max_bytes: int) -> None:
        """Let so many bytes be in flight from now on. What is running goes on."""
        with self._changed:
            self._max_bytes = max_bytes
            self._changed.notify_all()

    def hasten(self, job: Job, deadline: float) -> None:
        """Let a job run earlier: somebody more urgent wants it. A later deadline or a job that has begun is left."""
        with self._changed:
            if job._state == "queued" and deadline < job.deadline:
                job.deadline = deadline
                heappush(self._heap, (deadline, job._number, job))
                self._tidy()
                self._changed.notify()

    def cancel(self, job: Job) -> bool:
        """Take a job out of the queue. True: it has not begun and never will. Does not wait."""
        with self._changed:
            if job._state != "queued":
                return False
            job._state = "cancelled"
            self._queued -= 1
            self._waiting_bytes -= job.nbytes
            self._tidy()
            self._changed.notify()
            return True

    def close(self) -> list[Job]:
        """Cancel what is queued and wait for what is running. Returns the cancelled jobs, the most urgent first.

        Call it without any lock that a job takes. Idempotent: a second call waits too, and returns nothing.
        """
        with self._changed:
            self._closed = True
            dropped = [job for deadline, _, job in sorted(self._heap) if _valid(job, deadline)]
            self._heap.clear()
            for job in dropped:
                job._state = "cancelled"
            self._queued = self._waiting_bytes = 0
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not current_thread():
                thread.join()
        return dropped

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for the next job and run it; False after `close`. Holds on to no job while it waits."""
        with self._changed:
            while (job := self._head()) is None or not self._fits(job):
                if self._closed:
                    return False
                del job
                self._changed.wait()
            self._begin(job)
        try:
            job.run()
        except BaseException:  # whatever a job raises, SystemExit included, the next one needs this thread
            log.exception("a load job failed")
        finally:
            with self._changed:
                self._running -= 1
                self._running_bytes -= job.nbytes
        return True

    def _dequeue(self, job: Job) -> None:
        heappop(self._heap)
        job._state = "begun"
        self._queued -= 1
        self._waiting_bytes -= job.nbytes

    def _begin(self, job: Job) -> None:
        self._dequeue(job)
        self._running += 1
        self._running_bytes += job.nbytes
        # Each change wakes one worker. Where it lets several jobs begin, each that begins wakes the next.
        following = self._head()
        if following is not None and self._fits(following):
            self._changed.notify()

    def _fits(self, job: Job) -> bool:
        return not self._running or self._running_bytes + job.nbytes <= self._max_bytes

    def _head(self) -> Job | None:
        """Return the most urgent queued job."""
        while self._heap:
            deadline, _, job = self._heap[0]
            if _valid(job, deadline):
                return job
            heappop(self._heap)
        return None

    def _tidy(self) -> None:
        """Drop entries that are no longer valid once they are the greater part, so that the heap stays bounded."""
        if len(self._heap) > 2 * self._queued + _FEW:
            self._heap = [entry for entry in self._heap if _valid(entry[2], entry[0])]
            heapify(self._heap)


def _valid(job: Job, deadline: float) -> bool:
    return job._state == "queued" and job.deadline == deadline
