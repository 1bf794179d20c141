"""The cache's contract for asyncio: the same names as `tierkv.cache`, awaited wherever a call may block.

    cache = await tierkv.aio.connect("unix:///run/tierkv.sock")
    async with await cache.acquire(chain, wait_s=1.0) as read:
        for ref in read.blocks:
            use(read.view(ref.index))
    async with await cache.reserve(chain, start=n) as write:
        for grant in write.granted:
            write.buffer(grant.index)[:] = ...
            await write.commit([grant.index])

Calls run on private threads, over any `Cache`: requests, copies and checksums of written blocks never hold up the
event loop. `view`, `device_view` and `buffer` are plain memory and stay synchronous. A cancelled `acquire` or `reserve`
leaves no lease behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from tierkv.cache import (
    BlockRef,
    Cache,
    Chain,
    ComputeLease,
    Grant,
    Hit,
    LoadChoice,
    Pinned,
    ReadLease,
    Ticket,
    TicketProgress,
    WriteLease,
)
from tierkv.connected import ConnectedCache, Where
from tierkv.errors import CorruptBlock, Unavailable
from tierkv.pools import Pools
from tierkv.spec import KVSpec
from tierkv.storage.device import DeviceBlock

__all__ = [
    "AsyncCache",
    "AsyncComputeLease",
    "AsyncReadLease",
    "AsyncTicket",
    "AsyncWriteLease",
    "ConnectedAsyncCache",
    "connect",
]


async def connect(
    url: str,
    *,
    tenant: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout_s: float = 5.0,
    fail_open: bool = False,
    extra_s: float = 0.05,
    on_device: bool = False,
) -> ConnectedAsyncCache:
    """Connect to a daemon. Parameters and errors as `tierkv.connect`; failing open a `FailOpenAsyncCache`."""
    if fail_open:
        from tierkv.client.failopen_aio import FailOpenAsyncCache

        return await FailOpenAsyncCache.connect(
            url, tenant=tenant, token=token, ca=ca, timeout_s=timeout_s, extra_s=extra_s, on_device=on_device
        )
    from tierkv.client import connect as connect_client

    made = await asyncio.to_thread(
        connect_client, url, tenant=tenant, token=token, ca=ca, timeout_s=timeout_s, on_device=on_device
    )
    return ConnectedAsyncCache(made)


def _give_up(lease: ReadLease) -> None:
    """Release what a caller who went away will not."""
    if lease.compute is not None:
        lease.compute.release()
    lease.release()


class AsyncCache:
    """`tierkv.cache.Cache` for asyncio. Methods not described here are as there.

    Parameters
    ----------
    cache
        Embedded or connected; owned by this object from now on.
    pools
        Where its calls are made; owned as well.
    """

    def __init__(self, cache: Cache, pools: Pools | None = None) -> None:
        self._cache = cache
        self._pools = pools or Pools()

    async def register(self, spec: KVSpec) -> str:
        return await self._pools.run(partial(self._cache.register, spec))

    async def lookup(self, chain: Chain, *, wait_s: float = 0.0) -> Hit:
        return await self._pools.run(partial(self._cache.lookup, chain, wait_s=wait_s))

    async def prefetch(self, chain: Chain, *, deadline_s: float = 60.0) -> AsyncTicket:
        work = partial(self._cache.prefetch, chain, deadline_s=deadline_s)
        return AsyncTicket(await self._pools.run(work), self._pools)

    async def acquire(
        self,
        chain: Chain,
        *,
        wait_s: float = 10.0,
        ttl_s: float = 30.0,
        max_blocks: int | None = None,
        compute_s: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        session: str = "",
        groups: tuple[int, ...] | None = None,
        handoff: bool = False,
    ) -> AsyncReadLease:
        """As `Cache.acquire`. Where blocks travel as HTTP bodies, they have arrived when this returns."""

        def work() -> ReadLease:
            lease = self._cache.acquire(
                chain,
                wait_s=wait_s,
                ttl_s=ttl_s,
                max_blocks=max_blocks,
                compute_s=compute_s,
                prefill_tokens_per_s=prefill_tokens_per_s,
                session=session,
                groups=groups,
                handoff=handoff,
            )
            try:
                for ref in lease.blocks[:1]:
                    with contextlib.suppress(CorruptBlock):  # `view` will say so to whoever wants this block
                        lease.view(ref.index, ref.group)
            except BaseException:
                _give_up(lease)
                raise
            return lease

        return AsyncReadLease(await self._pools.wait(work, _give_up), self._pools)

    async def read_into(
        self, chain: Chain, index: int, out: memoryview, *, group: int = 0, wait_s: float = 0.0
    ) -> bool:
        work = partial(self._cache.read_into, chain, index, out, group=group, wait_s=wait_s)
        return await self._pools.wait(work)

    async def reserve(
        self,
        chain: Chain,
        *,
        start: int = 0,
        stop: int | None = None,
        wait_s: float = 1.0,
        ttl_s: float = 60.0,
        session: str = "",
    ) -> AsyncWriteLease:
        work = partial(self._cache.reserve, chain, start=start, stop=stop, wait_s=wait_s, ttl_s=ttl_s, session=session)
        return AsyncWriteLease(await self._pools.wait(work, lambda lease: lease.abort()), self._pools)

    async def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        return await self._pools.run(partial(self._cache.pin, chain, ttl_s))

    async def unpin(self, chain: Chain) -> int:
        return await self._pools.run(partial(self._cache.unpin, chain))

    async def end_session(self, namespace: str, session: str) -> int:
        return await self._pools.run(partial(self._cache.end_session, namespace, session))

    async def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        return await self._pools.run(partial(self._cache.pause_session, namespace, session, expected_s))

    async def delete(self, chain: Chain) -> int:
        return await self._pools.run(partial(self._cache.delete, chain))

    async def clear(self, namespace: str) -> int:
        return await self._pools.wait(partial(self._cache.clear, namespace))

    async def flush(self) -> None:
        await self._pools.wait(self._cache.flush)

    async def stats(self) -> dict[str, Any]:
        return await self._pools.run(self._cache.stats)

    async def close(self) -> None:
        """Close the cache. Idempotent; calls that are still waiting end with their result or `Unavailable`."""
        with contextlib.suppress(Unavailable):
            await self._pools.finish(self._cache.close)
        self._pools.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class ConnectedAsyncCache(AsyncCache):
    """`tierkv.connected.ConnectedCache` for asyncio."""

    def __init__(self, cache: ConnectedCache, pools: Pools | None = None) -> None:
        super().__init__(cache, pools)
        self._connected = cache

    async def where(self, chain: Chain, *, wait_s: float = 0.05) -> Where:
        return await self._pools.wait(partial(self._connected.where, chain, wait_s=wait_s))


class AsyncTicket:
    """`tierkv.cache.Ticket` for asyncio."""

    def __init__(self, ticket: Ticket, pools: Pools) -> None:
        self.id = ticket.id
        self._ticket = ticket
        self._pools = pools

    async def progress(self) -> TicketProgress:
        return await self._pools.run(self._ticket.progress)

    async def wait(self, wait_s: float, *, groups: int | None = None) -> TicketProgress:
        return await self._pools.wait(partial(self._ticket.wait, wait_s, groups=groups))

    async def cancel(self) -> None:
        await self._pools.finish(self._ticket.cancel)


class AsyncComputeLease:
    """`tierkv.cache.ComputeLease` for asyncio, with the same attributes."""

    def __init__(self, lease: ComputeLease, pools: Pools) -> None:
        self.id: str = lease.id
        self.start: int = lease.start
        self.stop: int = lease.stop
        self._lease = lease
        self._pools = pools

    async def renew(self, compute_s: float) -> None:
        await self._pools.run(partial(self._lease.renew, compute_s))

    async def release(self) -> None:
        await self._pools.finish(self._lease.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Unavailable):
            await self.release()


class AsyncReadLease:
    """`tierkv.cache.ReadLease` for asyncio, with the same attributes."""

    def __init__(self, lease: ReadLease, pools: Pools) -> None:
        self.id: str = lease.id
        self.blocks: tuple[BlockRef, ...] = lease.blocks
        self.hit_blocks: int = lease.hit_blocks
        self.hit_tokens: int = lease.hit_tokens
        self.published_blocks: int = lease.published_blocks
        self.tokens_by_tier: Mapping[str, int] = lease.tokens_by_tier
        self.missed_tokens: Mapping[str, int] = lease.missed_tokens
        self.saved_s: float = lease.saved_s
        self.waited_s: float = lease.waited_s
        self.choice: LoadChoice = lease.choice
        self.compute: AsyncComputeLease | None = AsyncComputeLease(lease.compute, pools) if lease.compute else None
        self.computed_elsewhere: bool = lease.computed_elsewhere
        self._lease = lease
        self._pools = pools

    def view(self, index: int, group: int = 0) -> memoryview:
        """As `ReadLease.view`: a checksum over memory, microseconds per block."""
        return self._lease.view(index, group)

    def device_view(self, index: int, group: int = 0) -> DeviceBlock | None:
        """As `ReadLease.device_view`: an address."""
        return self._lease.device_view(index, group)

    async def read_into(self, index: int, out: memoryview, group: int = 0) -> None:
        """As `ReadLease.read_into`. If the caller is cancelled, `out` may still be written to for a moment."""
        await self._pools.run(partial(self._lease.read_into, index, out, group))

    async def renew(self, ttl_s: float) -> None:
        await self._pools.run(partial(self._lease.renew, ttl_s))

    async def release(self) -> None:
        await self._pools.finish(self._lease.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Unavailable):  # the cache was closed inside: the lease ended with it
            await self.release()


class AsyncWriteLease:
    """`tierkv.cache.WriteLease` for asyncio, with the same attributes."""

    def __init__(self, lease: WriteLease, pools: Pools) -> None:
        self.id: str = lease.id
        self.grants: tuple[Grant, ...] = lease.grants
        self._lease = lease
        self._pools = pools

    @property
    def granted(self) -> tuple[Grant, ...]:
        """The grants that may be written."""
        return self._lease.granted

    def buffer(self, index: int, group: int = 0) -> memoryview:
        """As `WriteLease.buffer`: plain memory."""
        return self._lease.buffer(index, group)

    async def write(self, index: int, payload: bytes | bytearray | memoryview, group: int = 0) -> None:
        await self._pools.run(partial(self._lease.write, index, payload, group))

    async def commit(self, indices: Iterable[int] | None = None) -> int:
        """As `WriteLease.commit`. If the caller is cancelled meanwhile, the blocks may be published all the same."""
        return await self._pools.run(partial(self._lease.commit, indices))

    async def renew(self, ttl_s: float) -> None:
        await self._pools.run(partial(self._lease.renew, ttl_s))

    async def abort(self) -> None:
        await self._pools.finish(self._lease.abort)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Unavailable):
            await self.abort()
