"""Time and the cold tier in a test's hand: a clock that is set forward, and reads that wait for permission."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.storage.tier import BlockMeta


class Clock:
    """Sets the monotonic clock of an embedded cache and its leases forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: EmbeddedCache) -> None:
        self._engine = cache.engine
        self._ahead = 0.0
        shifted = SimpleNamespace(monotonic=self.now, time=time.time)
        for name, module in list(sys.modules.items()):
            if name.startswith(("tierkv.core.", "tierkv.handles")) and getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", shifted)

    def now(self) -> float:
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let time pass. What became due meanwhile is done by the cache's own thread, soon."""
        with self._engine._state.lock:
            self._ahead += seconds
            self._engine._wakeup.notify()


class HeldReads:
    """Holds reads of the cold tier until they are let through.

    Attributes
    ----------
    begun
        Keys of the reads, in the order in which they began.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: EmbeddedCache) -> None:
        self.begun: list[bytes] = []
        self._cache = cache
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        cold: Any = cache.engine.placement.cold
        read = cold.read_into

        def held(key: bytes, out: memoryview) -> BlockMeta:
            self.begun.append(key)
            assert self._open.is_set() or self._permits.acquire(timeout=30.0)
            meta: BlockMeta = read(key, out)
            return meta

        monkeypatch.setattr(cold, "read_into", held)

    def let(self, reads: int = 1) -> None:
        """Let some reads through, now or as they come."""
        for _ in range(reads):
            self._permits.release()

    def open(self) -> None:
        """Let everything through from now on."""
        self._open.set()
        self._permits.release(1000)

    def order(self, *chains: Chain, tenant: str = "default") -> list[tuple[int, int, int]]:
        """Return what has begun as (which of the chains, index, KV group)."""
        key = self._cache.engine.tenant(tenant).block_key
        names = {
            key(chain_hash, group): (n, index, group)
            for n, chain in enumerate(chains)
            for index, chain_hash in enumerate(chain.hashes)
            for group in range(4)
        }
        return [names[begun] for begun in self.begun]


def nothing_is_held(cache: EmbeddedCache) -> bool:
    """No pin, no load, no lease, no draft: whoever asked for something has got it or given it up."""
    engine = cache.engine
    state = engine._state
    with state.lock:
        idle = not engine._loader._running and not any(entry.pins for entry in state.index)
        return idle and not state.writing and not any(state.leases.counts().values()) and not engine._computing
