"""A real cache in memory, and one around it that fails where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.cache import Cache, Chain, Hit, Pinned, ReadLease, Ticket, WriteLease
from tierkv.spec import KVSpec


class FaultyCache(Cache):
    """Passes every call on, after raising `fail[method]` if there is one; calls `committed` after each publish."""

    def __init__(self, inner: Cache) -> None:
        self.inner = inner
        self.fail: dict[str, Exception] = {}
        self.committed: Callable[[], None] = lambda: None

    def check(self, method: str) -> None:
        if method in self.fail:
            raise self.fail[method]

    def register(self, spec: KVSpec) -> str:
        return self.inner.register(spec)

    def lookup(self, chain: Chain) -> Hit:
        return self.inner.lookup(chain)

    def prefetch(self, chain: Chain, **options: Any) -> Ticket:
        return self.inner.prefetch(chain, **options)

    def acquire(self, chain: Chain, **options: Any) -> ReadLease:
        self.check("acquire")
        return self.inner.acquire(chain, **options)

    def read_into(self, chain: Chain, index: int, out: memoryview, **options: Any) -> bool:
        return self.inner.read_into(chain, index, out, **options)

    def reserve(self, chain: Chain, **options: Any) -> WriteLease:
        self.check("reserve")
        return FaultyWriteLease(self, self.inner.reserve(chain, **options))

    def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        return self.inner.pin(chain, ttl_s)

    def unpin(self, chain: Chain) -> int:
        return self.inner.unpin(chain)

    def end_session(self, namespace: str, session: str) -> int:
        return self.inner.end_session(namespace, session)

    def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        return self.inner.pause_session(namespace, session, expected_s)

    def delete(self, chain: Chain) -> int:
        return self.inner.delete(chain)

    def clear(self, namespace: str) -> int:
        return self.inner.clear(namespace)

    def flush(self) -> None:
        self.inner.flush()

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class FaultyWriteLease(WriteLease):
    def __init__(self, cache: FaultyCache, inner: WriteLease) -> None:
        self.cache, self.inner = cache, inner
        self.id, self.grants = inner.id, inner.grants

    def buffer(self, index: int, group: int = 0) -> memoryview:
        self.cache.check("buffer")
        return self.inner.buffer(index, group)

    def write(self, index: int, payload: bytes | bytearray | memoryview, group: int = 0) -> None:
        self.cache.check("buffer")
        self.inner.write(index, payload, group)

    def commit(self, indices: Iterable[int] | None = None) -> int:
        self.cache.check("commit")
        count = self.inner.commit(indices)
        self.cache.committed()
        return count

    def renew(self, ttl_s: float) -> None:
        self.cache.check("renew")
        self.inner.renew(ttl_s)

    def abort(self) -> None:
        self.inner.abort()


def open_warm(directory: Path, capacity: str) -> Cache:
    return tierkv.open({"warm": {"capacity": capacity, "directory": str(directory)}})


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """An embedded cache of one memory tier, whose file lies in `tmp_path`."""
    with open_warm(tmp_path, "8MiB") as opened:
        yield opened


@pytest.fixture
def small_cache(tmp_path: Path) -> Iterator[Cache]:
    """A cache with room for 85 blocks of the tests' Llama."""
    with open_warm(tmp_path, "1MiB") as opened:
        yield opened


@pytest.fixture
def faulty(cache: Cache) -> FaultyCache:
    return FaultyCache(cache)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: tiny models gain nothing from more."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
