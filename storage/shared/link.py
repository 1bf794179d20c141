"""The way to a backend and back: a blocking facade over coroutines, on which every call has a deadline.

A backend that fails a few calls in a row is not asked for a while, and then by one call at a time until it answers.
One that is full is asked for everything but writes. While it has never been reached, it is tried in the background and
every call fails at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any, TypeVar

from tierkv.errors import ConfigError, StorageError, StorageFull, TierKVError, Unavailable
from tierkv.storage.breaker import Breaker
from tierkv.storage.shared.backend import Backend, BackendError, Buffer, Capacity, SupportsClaims
from tierkv.storage.shared.health import Health, Limits, LinkState
from tierkv.storage.shared.loop import acquire_loop, release_loop

__all__ = ["Link"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
Landed = Callable[[Buffer | TierKVError | None], None]

_OPEN_S = 3.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SLACK_S = 0.25
"""How much longer than its deadline a call waits for the loop to say so."""


class Link:
    """Calls to one backend, from any thread. Every method but the transfers' blocks, for as long as `Limits` says.

    They raise `Unavailable` for a backend that is not reached, does not answer in time or does not allow it,
    `StorageFull` for one without room, and `StorageError` for anything else it answers.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend = backend
        self._limits = limits
        self._breaker = Breaker()
        self._room = Breaker(failures_to_open=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._connected = False
        self._tried = Event()
        self._shut = False
        self._failure: ConfigError | None = None
        self._calls: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._bytes_in = 0
        self._bytes_out = 0
        self._hedged = 0
        self._last_error = ""
        self._unreached = ("still connecting", "it is tried again and again; see the shared tier's health")
        self.capacity = Capacity()

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def claims(self) -> bool:
        """Whether the backend can say who of several is first."""
        return isinstance(self._backend, SupportsClaims)

    def open(self) -> None:
        """Begin to connect; wait for the first try, for a few seconds at most.

        Raises `ConfigError` for a backend that can never be reached: a client library is missing.
        """
        self._loop = acquire_loop()
        self._schedule(self._connect())
        self._tried.wait(_OPEN_S + _SLACK_S)
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self) -> None:
        """End what is under way, and connections. Idempotent."""
        if self._shut or self._loop is None:
            self._shut = True
            return
        self._shut = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        release_loop()

    def check_open(self) -> None:
        """Raise `Unavailable` when the link is closed."""
        if self._shut or self._loop is None:
            raise Unavailable("the shared tier is closed")

    @property
    def available(self) -> bool:
        """Whether a call would be made at all now, rather than fail at once. Cheap."""
        return self._connected and not self._shut and not self._breaker.refuses

    def health(self) -> Health:
        state: LinkState = self._breaker.state if self._connected else "connecting"
        return Health(
            "shut" if self._shut else state,
            self._room.state != "closed",
            self._breaker.opened,
            dict(self._calls),
            dict(self._failures),
            self._bytes_in,
            self._bytes_out,
            self._hedged,
            self._last_error,
        )

    def present(self, names: Sequence[str]) -> list[bool]:
        """Say which names there are, `probe_width` of them at a time and all of these at once."""
        width = self._backend.probe_width

        async def ask() -> list[bool]:
            portions = [names[at : at + width] for at in range(0, len(names), width)]
            if len(portions) == 1:
                return await self._backend.present(names)
            answers = await asyncio.gather(*map(self._backend.present, portions))
            return [there for answer in answers for there in answer]

        return self._call("present", ask) if names else []

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        """Return small values."""
        return self._call("get_small", lambda: self._backend.get_many(names)) if names else []

    def heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        """Return the first bytes of values."""

        async def ask() -> list[bytes | None]:
            return list(await asyncio.gather(*(self._backend.get_head(name, nbytes) for name in names)))

        return self._call("heads", ask) if names else []

    def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        """Put a small value if what is there is `expected`. What was asked may be done though this raises."""
        return self._call("swap", lambda: self._backend.swap(name, expected, data), write=True)

    def delete(self, names: Sequence[str]) -> int:
        """Remove names, and with them the reason not to write any more."""

        async def ask() -> int:
            removed = await self._backend.delete(names)
            self._room.succeeded()
            return removed

        return self._call("delete", ask) if names else 0

    def claim(self, name: str, owner: str, ttl_s: float) -> bool:
        backend = self._backend
        assert isinstance(backend, SupportsClaims)
        return self._call("claim", lambda: backend.claim(name, owner, ttl_s), write=True)

    def unclaim(self, name: str, owner: str) -> None:
        backend = self._backend
        assert isinstance(backend, SupportsClaims)
        self._call("unclaim", lambda: backend.unclaim(name, owner))

    def names(self, prefix: str) -> list[str]:
        """List names, as long as each portion of them comes in the time of a transfer."""

        async def ask() -> list[str]:
            return [name async for name in _each_in(self._backend.names(prefix), self._limits.transfer_timeout_s)]

        return self._call("names", ask, timeout_s=None)

    def look(self) -> Capacity:
        """Ask how full the backend is, and remember it."""
        self.capacity = self._call("capacity", self._backend.capacity)
        return self.capacity

    def start_get(self, name: str, landed: Landed) -> None:
        """Begin to read a value. `landed` is called with it, on the loop's thread, or with the error."""
        self._transfer(self._get(name), landed)

    def start_put(self, name: str, data: Buffer, landed: Landed) -> None:
        """Begin to write a value, which stays as it is until `landed` is called, on the loop's thread, with None."""
        self._transfer(self._put(name, data), landed)

    def _transfer(self, coroutine: Coroutine[Any, Any, Buffer | None], landed: Landed) -> None:
        async def run() -> None:
            try:
                outcome: Buffer | TierKVError | None = await coroutine
            except TierKVError as error:
                outcome = error
            except BaseException:
                landed(Unavailable("the shared tier was closed during a transfer"))
                raise
            landed(outcome)

        try:
            self._admit(write=False)
            self._schedule(run())
        except TierKVError as error:
            coroutine.close()
            landed(error)

    async def _get(self, name: str) -> Buffer | None:
        async with self._slots:
            data = await self._guarded("get", lambda: self._asked_twice(name), self._limits.transfer_timeout_s)
        self._bytes_in += 0 if data is None else memoryview(data).nbytes
        return data

    async def _put(self, name: str, data: Buffer) -> None:
        async with self._slots:
            await self._guarded(
                "put", lambda: self._backend.put(name, data), self._limits.transfer_timeout_s, write=True
            )
        self._bytes_out += memoryview(data).nbytes

    async def _asked_twice(self, name: str) -> Buffer | None:
        """Read a value, and if that takes long, once more: the first answer counts."""
        if self._limits.hedge_s is None:
            return await self._backend.get(name)
        reads = {asyncio.ensure_future(self._backend.get(name))}
        try:
            done, _ = await asyncio.wait(reads, timeout=self._limits.hedge_s)
            if not done:
                self._hedged += 1
                reads.add(asyncio.ensure_future(self._backend.get(name)))
            while True:
                done, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                good = [read for read in done if read.exception() is None]
                if good or not waiting:
                    return (good or list(done))[0].result()
                reads = waiting
        finally:
            for read in reads:
                read.cancel()

    def _call(
        self, what: str, ask: Callable[[], Awaitable[_T]], *, write: bool = False, timeout_s: float | None = 0.0
    ) -> _T:
        if timeout_s == 0.0:
            timeout_s = self._limits.probe_timeout_s
        self._admit(write)
        answer: Future[_T] = Future()

        async def run() -> None:
            try:
                result = await self._guarded(what, ask, timeout_s, write=write)
            except BaseException as error:
                answer.set_exception(error if isinstance(error, Exception) else self._no_answer(what))
                if not isinstance(error, Exception):
                    raise
            else:
                answer.set_result(result)

        self._schedule(run())
        try:
            return answer.result(None if timeout_s is None else timeout_s + _SLACK_S)
        except TimeoutError:  # the loop itself is stuck
            raise self._no_answer(what) from None

    def _admit(self, write: bool) -> None:
        """Raise at once what a call would come to."""
        self.check_open()
        if not self._connected:
            why, remedy = self._unreached
            raise Unavailable(f"the shared tier ({self._backend.kind}) was not reached yet: {why}", remedy=remedy)
        if self._breaker.refuses:
            raise Unavailable(
                f"the shared tier ({self._backend.kind}) failed before and is not asked for a while: "
                f"{self._last_error}",
                remedy="it is asked again in a moment; see the shared tier's health",
            )
        if write and self._room.refuses:
            raise self._no_room()

    async def _guarded(
        self, what: str, ask: Callable[[], Awaitable[_T]], timeout_s: float | None, *, write: bool = False
    ) -> _T:
        self._admit(write)
        self._calls[what] = self._calls.get(what, 0) + 1
        probe = self._breaker.begin()
        room_probe = write and self._room.begin()
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                result = await ask()
            answered = True
            if write:
                self._room.succeeded()
            return result
        except TimeoutError:
            self._note("timeout", f"no answer to {what} within {timeout_s} s")
            raise self._no_answer(what) from None
        except BackendError as error:
            self._note(error.kind, str(error))
            answered = error.kind == "full"
            if answered:
                self._room.failed(room_probe)
            raise self._translated(error) from error
        finally:
            if room_probe and self._room.state == "half-open":
                self._room.failed(room_probe)
            if answered:
                self._succeeded()
            else:
                self._failed(probe)

    def _succeeded(self) -> None:
        if self._breaker.state != "closed":
            log.info("the shared tier (%s) answers again", self._backend.kind)
        self._breaker.succeeded()

    def _failed(self, probe: bool) -> None:
        if self._breaker.failed(probe):
            log.warning("not asking the shared tier (%s) for a while: %s", self._backend.kind, self._last_error)

    def _translated(self, error: BackendError) -> TierKVError:
        if error.kind == "full":
            return self._no_room()
        if error.kind == "failed":
            return StorageError(f"the shared tier failed: {error.message}", remedy=error.remedy)
        return Unavailable(f"the shared tier cannot be used: {error.message}", remedy=error.remedy)

    def _no_answer(self, what: str) -> Unavailable:
        return Unavailable(
            f"the shared tier ({self._backend.kind}) did not answer in time ({what})",
            remedy="check its load and the network, or allow it more time",
        )

    def _no_room(self) -> StorageFull:
        return StorageFull(
            f"the shared tier ({self._backend.kind}) is full", remedy="let it evict (allkeys-lru), or give it more room"
        )

    def _note(self, kind: str, message: str) -> None:
        self._failures[kind] = self._failures.get(kind, 0) + 1
        self._last_error = message

    def _schedule(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run on the loop, or raise `Unavailable`."""
        try:
            self.check_open()
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._start, coroutine)
        except (Unavailable, RuntimeError):  # the loop was closed this moment
            coroutine.close()
            raise Unavailable("the shared tier is closed") from None

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._shut:
            task.cancel()

    async def _connect(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._connected:
            try:
                async with asyncio.timeout(_OPEN_S):
                    await self._backend.open()
                    self.capacity = await self._backend.capacity()
            except (BackendError, TimeoutError) as error:
                if isinstance(error, BackendError):
                    self._note(error.kind, str(error))
                    self._unreached = error.message, error.remedy
                else:
                    self._note("timeout", f"no connection within {_OPEN_S} s")
                    self._unreached = self._last_error, "check its load, the network, and that its address is right"
                if not self._tried.is_set():
                    log.warning("the shared tier (%s) is not reached yet: %s", self._backend.kind, self._last_error)
                await self._backend.close()
                self._tried.set()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except ConfigError as error:
                self._failure = error
                self._note("failed", str(error))
                self._tried.set()
                return
            else:
                self._connected = True
                if self._tried.is_set():
                    log.info("the shared tier (%s) is reached", self._backend.kind)
                self._tried.set()

    async def _end(self) -> None:
        this = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not this]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._backend.close()


async def _each_in(names: AsyncIterator[str], timeout_s: float) -> AsyncIterator[str]:
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                name = await anext(names)
        except StopAsyncIteration:
            return
        yield name
