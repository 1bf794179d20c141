"""Threads on which the asyncio client makes the calls that may block."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from tierkv.errors import Unavailable

__all__ = ["Pools", "PromptPools"]

T = TypeVar("T")
_WAITING_THREADS = 32
_QUICK_THREADS = 4


class Pools:
    """Two pools: calls that wait for others must not take the threads on which those others finish.

    A forked child has none of its parent's threads and gets pools of its own.
    """

    def __init__(self) -> None:
        self._closed = False
        self._open()

    async def run(self, work: Callable[[], T]) -> T:
        """Run a call that is over soon. Cancelled before a thread has taken it, it does not run at all."""
        return await asyncio.wrap_future(self._submit(work))

    async def finish(self, work: Callable[[], None]) -> None:
        """Run a call that must take place even if the caller is cancelled."""
        await asyncio.shield(asyncio.wrap_future(self._submit(work)))

    async def wait(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Run a call that may wait. If the caller is cancelled meanwhile, `undo` gets its result."""
        job = self._submit(work, waiting=True)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if undo is not None:
                # Called by the thread that finishes the job, or right here if it is finished: never undo here.
                job.add_done_callback(lambda done: self._undo(done, undo))
            raise

    def close(self) -> None:
        """Take no more calls; those that run go on."""
        self._closed = True
        if self._pid == os.getpid():
            self._waiting.shutdown(wait=False)
            self._quick.shutdown(wait=False)

    def _undo(self, done: Future[T], undo: Callable[[T], None]) -> None:
        if not done.cancelled() and done.exception() is None:
            with contextlib.suppress(Unavailable):  # closed: the leases are gone with their cache
                self._submit(partial(undo, done.result()))

    def _open(self) -> None:
        self._pid = os.getpid()
        self._waiting = ThreadPoolExecutor(_WAITING_THREADS, "tierkv-aio-waiting")
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, "tierkv-aio")

    def _submit(self, work: Callable[[], T], *, waiting: bool = False) -> Future[T]:
        if self._pid != os.getpid() and not self._closed:
            self._open()
        try:
            return (self._waiting if waiting else self._quick).submit(work)
        except RuntimeError:
            raise Unavailable("this client is closed", remedy="connect again") from None


class PromptPools(Pools):
    """Pools for a cache that keeps nobody waiting, not even for a thread.

    Parameters
    ----------
    until
        Context in which the calls of a thread end by a deadline, as `Transport.until`.
    patience_s
        How long a call may wait for a thread, in seconds. Then it is made by the event loop, with no time left: a cache
        that fails open answers that without asking anybody.
    finish_s
        How long to wait for a call that must take place; it goes on without the caller.
    """

    def __init__(
        self, until: Callable[[float], AbstractContextManager[None]], *, patience_s: float, finish_s: float
    ) -> None:
        super().__init__()
        self._until = until
        self._patience_s = patience_s
        self._finish_s = finish_s

    async def finish(self, work: Callable[[], None]) -> None:
        await asyncio.wait({asyncio.wrap_future(super()._submit(work))}, timeout=self._finish_s)

    def _submit(self, work: Callable[[], T], *, waiting: bool = False) -> Future[T]:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread that undoes what nobody waits for any more
            return super()._submit(work, waiting=waiting)
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        job = super()._submit(run, waiting=waiting)

        def give_up() -> None:
            if job.cancel():
                with self._until(-math.inf):
                    run()

        loop.call_later(self._patience_s, give_up)
        return answer
