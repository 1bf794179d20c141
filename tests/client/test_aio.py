"""The asyncio client: the contract's names, nothing blocks the loop, nothing leaks when tasks are cancelled."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import tierkv
from tests.service.daemon import BLOCK_BYTES, PATIENCE_S, SPEC, Daemon, chain, payload
from tierkv import aio
from tierkv.cache import Cache, Chain, ReadLease, Ticket, WriteLease
from tierkv.config import parse_config
from tierkv.connected import ConnectedCache
from tierkv.core.build import build_engine
from tierkv.embedded import EmbeddedCache
from tierkv.errors import InvalidRequest, LeaseLost, NotFound, Unavailable

CONFIG = {"warm": {"capacity": "8MiB"}}


@pytest.fixture(params=["embedded", "shared", "bodies"])
async def cache(request: pytest.FixtureRequest, daemon: Daemon) -> AsyncIterator[aio.AsyncCache]:
    if request.param == "embedded":
        cache = aio.AsyncCache(tierkv.open(CONFIG))
    else:
        cache = await aio.connect(daemon.url if request.param == "shared" else daemon.tcp_url)
    async with cache:
        await cache.register(SPEC)
        await cache.clear(SPEC.namespace)
        yield cache


class Held(EmbeddedCache):
    """A cache whose acquire and reserve do their work and then keep the caller until told to answer."""

    def __init__(self) -> None:
        super().__init__(build_engine(parse_config(CONFIG)), "default")
        self.working = threading.Semaphore(0)
        self.proceed = threading.Event()
        self.calls = 0

    def _hold(self) -> None:
        self.calls += 1
        self.working.release()
        assert self.proceed.wait(PATIENCE_S)

    def acquire(self, chain: Chain, **options: Any) -> ReadLease:
        lease = super().acquire(chain, **options)
        self._hold()
        return lease

    def reserve(self, chain: Chain, **options: Any) -> WriteLease:
        lease = super().reserve(chain, **options)
        self._hold()
        return lease


@pytest.fixture
def held() -> Iterator[Held]:
    with Held() as held:
        held.register(SPEC)
        held.proceed.set()
        with EmbeddedCache.reserve(held, chain(4)) as write:
            for grant in write.granted:
                write.buffer(grant.index)[:] = payload(chain(4), grant.index)
            write.commit()
        held.proceed.clear()
        held.calls = 0
        yield held
        held.proceed.set()


async def store(cache: aio.AsyncCache, of: Chain) -> int:
    async with await cache.reserve(of) as write:
        for grant in write.granted:
            write.buffer(grant.index)[:] = payload(of, grant.index)
        return await write.commit()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("contract", "async_class"),
    [
        (Cache, aio.AsyncCache),
        (ConnectedCache, aio.ConnectedAsyncCache),
        (ReadLease, aio.AsyncReadLease),
        (WriteLease, aio.AsyncWriteLease),
        (Ticket, aio.AsyncTicket),
    ],
)
def test_names_and_parameters_are_the_contracts(contract: type, async_class: type) -> None:
    synchronous = {"view", "device_view", "buffer"}
    for name, method in inspect.getmembers(contract, inspect.isfunction):
        if name.startswith("_"):
            continue
        theirs = getattr(async_class, name)
        assert inspect.iscoroutinefunction(theirs) == (name not in synchronous), name
        ours = inspect.signature(method).parameters
        assert list(inspect.signature(theirs).parameters.values()) == list(ours.values()), name


async def test_a_block_goes_in_and_comes_out(cache: aio.AsyncCache) -> None:
    wanted = chain(6)
    assert await store(cache, wanted) == 6
    assert (await cache.lookup(wanted)).blocks == 6
    ticket = await cache.prefetch(wanted)
    assert (await ticket.progress()).blocks_done >= 0
    await ticket.cancel()
    async with await cache.acquire(wanted, max_blocks=5) as read:
        assert (read.hit_blocks, read.hit_tokens, read.published_blocks) == (5, 80, 5)
        assert sum(read.tokens_by_tier.values()) == 80
        await read.renew(60)
        for ref in read.blocks:
            assert bytes(read.view(ref.index)) == payload(wanted, ref.index)
        out = bytearray(BLOCK_BYTES)
        await read.read_into(3, memoryview(out))
        assert out == payload(wanted, 3)
    with pytest.raises(LeaseLost):
        read.view(0)
    async with await cache.reserve(chain(1, seed=1)) as write:
        await write.renew(60)
        await write.abort()
        with pytest.raises(LeaseLost):
            write.buffer(0)
    assert await cache.delete(wanted) == 1
    await cache.flush()
    assert await cache.clear(SPEC.namespace) == 5
    assert (await cache.stats())["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}


async def test_errors_are_the_contracts(cache: aio.AsyncCache) -> None:
    with pytest.raises(NotFound):
        await cache.lookup(Chain("ab" * 32, (bytes(32),)))
    with pytest.raises(InvalidRequest):
        await cache.reserve(chain(2), start=3)
    await store(cache, chain(1))
    async with await cache.acquire(chain(1)) as read:
        with pytest.raises(InvalidRequest):
            read.view(7)


async def test_many_tasks_at_once(cache: aio.AsyncCache) -> None:
    async def work(seed: int) -> None:
        mine = chain(2, seed=1000 + seed)
        assert await store(cache, mine) == 2
        async with await cache.acquire(mine, wait_s=30) as read:
            assert [bytes(read.view(index)) for index in range(2)] == [payload(mine, index) for index in range(2)]

    async with asyncio.TaskGroup() as tasks:
        for seed in range(100):
            tasks.create_task(work(seed))
    assert (await cache.stats())["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}


async def test_tasks_cancelled_at_any_moment_leave_no_lease(cache: aio.AsyncCache) -> None:
    async def work(seed: int) -> None:
        mine = chain(2, seed=2000 + seed % 10)
        await store(cache, mine)
        async with await cache.acquire(mine):
            await asyncio.sleep(0)

    for pause in range(40):
        tasks = [asyncio.create_task(work(seed)) for seed in range(5)]
        for _ in range(pause):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while (await cache.stats())["leases"] != {"read": 0, "write": 0, "compute": 0, "pin": 0}:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_lease_that_arrives_after_its_task_was_cancelled_is_given_back(held: Held, verb: str) -> None:
    cache = aio.AsyncCache(held)
    task = asyncio.create_task(getattr(cache, verb)(chain(6)))
    await asyncio.to_thread(held.working.acquire)
    assert sum(held.stats()["leases"].values()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.proceed.set()
    await eventually(lambda: sum(held.stats()["leases"].values()) == 0)
    await cache.close()


async def test_a_timeout_is_a_cancellation(held: Held) -> None:
    cache = aio.AsyncCache(held)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cache.acquire(chain(4)), 0.01)
    held.proceed.set()
    await eventually(lambda: sum(held.stats()["leases"].values()) == 0)
    await cache.close()


async def test_a_lease_that_arrives_as_its_task_is_cancelled_is_given_back(held: Held) -> None:
    cache = aio.AsyncCache(held)
    held.proceed.set()
    task = asyncio.create_task(cache.acquire(chain(4)))
    await asyncio.sleep(0)
    while not held.calls or sum(held.stats()["leases"].values()) == 0:
        pass  # keep the loop from delivering the result
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: sum(held.stats()["leases"].values()) == 0)
    await cache.close()


async def test_while_many_wait_others_go_on(held: Held) -> None:
    """More waiting acquires than threads: short calls have threads of their own, and queued ones can be cancelled."""
    cache = aio.AsyncCache(held)
    waiting = [asyncio.create_task(cache.acquire(chain(4))) for _ in range(60)]
    await eventually(lambda: held.calls == 32)
    assert (await cache.lookup(chain(4))).blocks == 4
    assert (await cache.stats())["leases"]["read"] == 32
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held.proceed.set()
    await eventually(lambda: sum(held.stats()["leases"].values()) == 0)
    assert held.calls == 32, "a call cancelled in the queue was made all the same"
    await cache.close()


async def test_cancelled_inside_a_lease(cache: aio.AsyncCache) -> None:
    await store(cache, chain(2))
    inside = asyncio.Event()

    async def hold() -> None:
        async with await cache.acquire(chain(2)), await cache.reserve(chain(4)):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await inside.wait()
    assert (await cache.stats())["leases"] == {"read": 1, "write": 1, "compute": 0, "pin": 0}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await cache.stats())["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}


async def test_a_closed_cache(cache: aio.AsyncCache) -> None:
    await store(cache, chain(2))
    async with await cache.acquire(chain(2)):
        await cache.close()
        await cache.close()
    with pytest.raises(Unavailable):
        await cache.lookup(chain(2))
    with pytest.raises(Unavailable):
        await cache.acquire(chain(2))


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable):
        await aio.connect("unix:///nowhere/s")
