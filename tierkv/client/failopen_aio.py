"""`tierkv.client.failopen` for asyncio."""

from __future__ import annotations

import asyncio
import os

from tierkv.aio import ConnectedAsyncCache
from tierkv.client.breaker import Health
from tierkv.client.failopen import FailOpenCache
from tierkv.pools import PromptPools

__all__ = ["FailOpenAsyncCache"]

_THREAD_SHARE = 0.2  # of extra_s: the longest wait for a thread; the rest is for the call on it


class FailOpenAsyncCache(ConnectedAsyncCache):
    """As `AsyncCache`; never raises for reasons of the cache, and no call takes longer than its bound.

    Parameters
    ----------
    cache
        Made for four fifths of `extra_s`. Owned by this object from now on.
    extra_s
        As for `FailOpenCache`.
    """

    def __init__(self, cache: FailOpenCache, extra_s: float) -> None:
        pools = PromptPools(cache.until, patience_s=_THREAD_SHARE * extra_s, finish_s=extra_s)
        super().__init__(cache, pools)
        self._health = cache.health

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        tenant: str | None,
        token: str | None,
        ca: str | os.PathLike[str] | None,
        timeout_s: float,
        extra_s: float,
        on_device: bool = False,
    ) -> FailOpenAsyncCache:
        """Connect, if there is a daemon. Raises `InvalidRequest` for arguments that cannot be."""

        def connect() -> FailOpenCache:
            inner_s = (1 - _THREAD_SHARE) * extra_s
            return FailOpenCache.connect(
                url, tenant=tenant, token=token, ca=ca, timeout_s=timeout_s, extra_s=inner_s, on_device=on_device
            )

        return cls(await asyncio.to_thread(connect), extra_s)

    def health(self) -> Health:
        """Say how the daemon has been doing. Asks nobody."""
        return self._health()
