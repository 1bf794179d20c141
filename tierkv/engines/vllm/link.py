"""The cache as the connector's two sides use it: with a time by which everything is over, and one embedded cache for
both where they share a process."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from contextlib import AbstractContextManager
from threading import Lock

import tierkv
from tierkv.client.guard import GuardedTransport
from tierkv.client.remote import RemoteCache
from tierkv.embedded import EmbeddedCache
from tierkv.engines.vllm.options import Options
from tierkv.errors import TierKVError, Unavailable

__all__ = ["Link", "open_link"]

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_PROBE_SHARE = 0.5  # of extra_s: what is left is for the request itself
_EMBEDDED: dict[str, tuple[EmbeddedCache, int]] = {}
_SHARING = Lock()


class Link:
    """A cache that may be gone at any time. Whoever uses it catches what that raises, and tells `failed`.

    Unlike a fail-open cache it does not look at blocks before they are used: the scheduler's side never uses them, and
    the worker's verifies each when it copies it.

    Attributes
    ----------
    cache
        The cache. Its calls raise.
    """

    def __init__(self, cache: RemoteCache | EmbeddedCache, transport: GuardedTransport | None, shared: str) -> None:
        self.cache = cache
        self._counts: Counter[str] = Counter()
        self._counting = Lock()
        self._transport = transport
        self._shared = shared
        self._told: set[type[BaseException]] = set()

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """End what this thread asks a daemon inside in so many seconds."""
        if self._transport is None:
            return contextlib.nullcontext()
        return self._transport.until(time.monotonic() + seconds)

    def count(self, name: str, times: int = 1) -> None:
        """Note that something has happened."""
        if times:
            with self._counting:
                self._counts[name] += times

    def take_counts(self) -> dict[str, int]:
        """Return how often what has happened since the last call."""
        if not self._counts:
            return {}
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure, and tell the log about the first of each kind; an absent daemon has been told about."""
        self.count(f"{what}_failed")
        if isinstance(error, Unavailable) or type(error) in self._told:
            return
        self._told.add(type(error))
        unexpected = not isinstance(error, TierKVError)
        log.warning("%s failed, taken for a miss like all such from now on: %s", what, error, exc_info=unexpected)

    def close(self) -> None:
        """Close the connection, or the embedded cache with its last user. Never raises."""
        try:
            if self._shared and not _leave(self._shared):
                return
            with self.within(_TIMEOUT_S):
                self.cache.close()
        except Exception as error:
            self.failed("close", error)


def open_link(options: Options, engine_id: str) -> Link:
    """Open the cache that the options name; an embedded one is opened once per engine and process.

    A daemon need not be there. Raises `InvalidRequest` for a URL that cannot be, and what `tierkv.open` raises.
    """
    if options.url is None:
        return Link(_join(options, engine_id), None, engine_id)
    transport = GuardedTransport(
        options.url,
        options.tenant,
        _TIMEOUT_S,
        token=options.token,
        ca=options.ca,
        probe_s=_PROBE_SHARE * options.extra_s,
    )
    return Link(RemoteCache(transport, _TIMEOUT_S), transport, "")


def _join(options: Options, engine_id: str) -> EmbeddedCache:
    with _SHARING:
        cache, users = _EMBEDDED.get(engine_id, (None, 0))
        if cache is None:
            opened = tierkv.open(options.config, tenant=options.tenant or "default")
            assert isinstance(opened, EmbeddedCache)
            cache = opened
        _EMBEDDED[engine_id] = cache, users + 1
        return cache


def _leave(engine_id: str) -> bool:
    """Say that a user of an embedded cache is gone, and whether it was the last."""
    with _SHARING:
        cache, users = _EMBEDDED.pop(engine_id)
        if users > 1:
            _EMBEDDED[engine_id] = cache, users - 1
        return users == 1
