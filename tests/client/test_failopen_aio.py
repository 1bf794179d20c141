"""The asyncio client failing open: the bound holds for every task, however many there are."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.client.impostors import at_an_address
from tests.client.test_failopen import EXTRA_S, SLACK_S, WAIT_S, WANTED, stopped
from tests.service.daemon import BLOCK_BYTES, PATIENCE_S, SPEC, Daemon, chain, payload
from tierkv import aio
from tierkv.client.failopen_aio import FailOpenAsyncCache
from tierkv.errors import InvalidRequest


@asynccontextmanager
async def connected(url: str, *, extra_s: float = EXTRA_S) -> AsyncIterator[FailOpenAsyncCache]:
    cache = await aio.connect(url, fail_open=True, timeout_s=0.2, extra_s=extra_s)
    assert isinstance(cache, FailOpenAsyncCache)
    async with cache:
        await cache.register(SPEC)
        yield cache


async def store(cache: aio.AsyncCache) -> int:
    async with await cache.reserve(WANTED) as write:
        for grant in write.granted:
            write.buffer(grant.index)[:] = payload(WANTED, grant.index)
        return await write.commit()


async def at_work(cache: FailOpenAsyncCache) -> None:
    """Store the wanted blocks; on a busy machine that may take a try or two."""
    async with asyncio.timeout(PATIENCE_S):
        while (await cache.lookup(WANTED)).blocks != 4 or cache.health().state != "closed":
            await store(cache)


async def found(cache: aio.AsyncCache, wait_s: float, bound_s: float) -> int:
    began = time.monotonic()
    async with await cache.acquire(WANTED, wait_s=wait_s) as read:
        assert time.monotonic() - began < bound_s + SLACK_S
        return read.hit_blocks


async def test_a_hundred_tasks_on_a_stopped_daemon(daemon: Daemon) -> None:
    async with connected(daemon.url) as cache:
        await at_work(cache)
        async with await cache.acquire(WANTED) as read:
            for ref in read.blocks:
                assert bytes(read.view(ref.index)) == payload(WANTED, ref.index)
        with stopped(daemon):
            tasks = [found(cache, WAIT_S, WAIT_S + EXTRA_S) for _ in range(100)]
            assert await asyncio.gather(*tasks) == [0] * 100
            began = time.monotonic()
            hits = await asyncio.gather(*(cache.lookup(WANTED) for _ in range(100)))
            assert time.monotonic() - began < EXTRA_S + SLACK_S
            assert {hit.blocks for hit in hits} == {0}
        await at_work(cache)


@pytest.mark.parametrize("name", ["silent", "slow body", "nonsense", "full queue", "nothing"])
async def test_where_no_daemon_works(name: str) -> None:
    with at_an_address(name) as url:
        async with connected(url) as cache:
            tasks = [found(cache, WAIT_S, WAIT_S + EXTRA_S) for _ in range(40)]
            assert await asyncio.gather(*tasks) == [0] * 40
            assert await store(cache) == 0
            assert await cache.stats() == {} or name == "nonsense"
            assert not await cache.read_into(WANTED, 0, memoryview(bytearray(BLOCK_BYTES)))
            assert (await (await cache.prefetch(WANTED)).wait(1)).state == "done"


async def test_when_all_threads_wait_nobody_waits_for_a_thread(daemon: Daemon) -> None:
    async with connected(daemon.url, extra_s=0.5) as cache:
        wanted = chain(3, seed=77)
        first = await cache.acquire(wanted, compute_s=PATIENCE_S)
        assert first.compute is not None
        waiting = [asyncio.create_task(cache.acquire(wanted, wait_s=PATIENCE_S, compute_s=1)) for _ in range(32)]
        await asyncio.sleep(0)  # now each has a thread
        began = time.monotonic()
        async with await cache.acquire(wanted, wait_s=0) as read:
            assert read.hit_blocks == 0
        assert time.monotonic() - began < 0.5 + SLACK_S
        assert not any(task.done() for task in waiting)
        assert cache.health().misses == 1, "there was a thread for it: then this tests nothing"
        await first.compute.release()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_callers_mistakes_are_its_own(daemon: Daemon) -> None:
    async with connected(daemon.url) as cache:
        with pytest.raises(InvalidRequest):
            await cache.acquire(WANTED, wait_s=-1)
        with pytest.raises(InvalidRequest):
            await cache.read_into(WANTED, 4, memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(InvalidRequest):
        await aio.connect("ftp://nowhere", fail_open=True)


def test_a_forked_child_has_threads_of_its_own(daemon: Daemon) -> None:
    async def parent() -> FailOpenAsyncCache:
        cache = await aio.connect(daemon.url, fail_open=True, extra_s=5)
        assert isinstance(cache, FailOpenAsyncCache)
        await cache.register(SPEC)
        await store(cache)
        return cache

    async def look(cache: FailOpenAsyncCache) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return (await cache.lookup(WANTED)).blocks

    cache = asyncio.run(parent())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if asyncio.run(look(cache)) == 4 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(look(cache)) == 4
    asyncio.run(cache.close())
