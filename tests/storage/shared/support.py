"""Stores over real engines, and backends that can be cut off or made to lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any, ClassVar
from uuid import uuid4

from tests.conformance.tier_suite import block, key_of, meta_of
from tierkv.storage.shared import Backend, BackendError, Capacity, SharedStore, SharedTier, make_backend
from tierkv.storage.shared.backend import Buffer
from tierkv.storage.tier import BlockMeta

TENANT, NAMESPACE = bytes(8), bytes(32)
PATIENT = {"probe_timeout_s": 10.0, "transfer_timeout_s": 20.0}
"""Timeouts for tests that are not about them."""
_numbers = count()


def fresh_prefix() -> str:
    """A prefix that nobody else has, on whatever engine."""
    return f"tests/{uuid4().hex[:12]}-{next(_numbers)}"


def open_store(backend: Backend | str, **settings: Any) -> SharedStore:
    """Open a store; with `PATIENT` timeouts and a prefix of its own unless told otherwise."""
    made = make_backend(backend) if isinstance(backend, str) else backend
    store = SharedStore(made, **{"prefix": fresh_prefix(), **PATIENT, **settings})
    store.open()
    return store


def put(tier: SharedTier, *numbers: int, length: int = 5000, **fields: object) -> None:
    items = []
    for number in numbers:
        payload = block(number, length)
        items.append((key_of(number), payload, of_area(tier, payload, **fields)))
    assert tier.put_many(items) == [None] * len(numbers)


def of_area(tier: SharedTier, payload: bytes, **fields: object) -> BlockMeta:
    return meta_of(payload, tenant=tier.tenant, namespace=tier.namespace, **fields)


def keys(numbers: Sequence[int] | range) -> list[bytes]:
    return [key_of(number) for number in numbers]


class Between(Backend):
    """Passes everything on to another backend, unless it is cut off. Subclasses change what comes back."""

    kind: ClassVar[str] = "valkey"
    probe_width: ClassVar[int] = 256
    largest_value: ClassVar[int] = 512 << 20

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.cut = False
        self.asked: list[tuple[str, int]] = []

    async def _pass(self, what: str, many: int, call: Callable[[], Any]) -> Any:
        if self.cut:
            raise BackendError("cut off", kind="down", remedy="")
        self.asked.append((what, many))
        return await call()

    async def open(self) -> None:
        await self._pass("open", 1, self.inner.open)

    async def present(self, names: Sequence[str]) -> list[bool]:
        return list(await self._pass("present", len(names), lambda: self.inner.present(names)))

    async def get(self, name: str) -> Buffer | None:
        got: Buffer | None = await self._pass("get", 1, lambda: self.inner.get(name))
        return got

    async def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        return list(await self._pass("get_many", len(names), lambda: self.inner.get_many(names)))

    async def get_head(self, name: str, nbytes: int) -> bytes | None:
        got: bytes | None = await self._pass("get_head", 1, lambda: self.inner.get_head(name, nbytes))
        return got

    async def put(self, name: str, data: Buffer) -> None:
        await self._pass("put", 1, lambda: self.inner.put(name, data))

    async def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        return bool(await self._pass("swap", 1, lambda: self.inner.swap(name, expected, data)))

    async def delete(self, names: Sequence[str]) -> int:
        return int(await self._pass("delete", len(names), lambda: self.inner.delete(names)))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        async for name in self.inner.names(prefix):
            yield name

    async def capacity(self) -> Capacity:
        got: Capacity = await self._pass("capacity", 1, self.inner.capacity)
        return got

    async def close(self) -> None:
        await self.inner.close()


class SlowFirst(Between):
    """Answers the first read of each name only when the second has been answered."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.answered = asyncio.Event()
        self.reads = 0

    async def get(self, name: str) -> Buffer | None:
        self.reads += 1
        if self.reads == 1:
            await self.answered.wait()
        got = await super().get(name)
        self.answered.set()
        return got
