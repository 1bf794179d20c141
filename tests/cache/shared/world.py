"""A storage engine in this process, for tests that must say when and how it fails, and machines that share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tierkv.config import parse_config
from tierkv.core.build import bounds, build_engine
from tierkv.core.engine import Engine
from tierkv.embedded import EmbeddedCache
from tierkv.storage.shared import SharedStore
from tierkv.storage.shared.backend import Backend, BackendError, Capacity

__all__ = ["DictBackend", "Machine", "World"]

SECRET = bytes(range(32))


class World:
    """What all backends of a test have in common.

    Attributes
    ----------
    values, claims
        Name -> bytes; name -> owner and end (monotonic seconds).
    calls
        What was asked, in order: the method and the names.
    down, full
        Every call, or every write, fails.
    stuck
        Methods that do not answer while they are in it.
    slow_s
        Seconds that reading a value takes.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.claims: dict[str, tuple[str, float]] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.down = False
        self.full = False
        self.stuck: set[str] = set()
        self.slow_s = 0.0

    def blocks(self) -> list[str]:
        """Names of values that are blocks: those with a container in them."""
        return [name for name, data in list(self.values.items()) if b"TKVC" in data[:512]]

    def asked(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.calls)


class DictBackend(Backend):
    kind: ClassVar[str] = "dict"
    probe_width: ClassVar[int] = 512
    largest_value: ClassVar[int] = 512 << 20

    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> None:
        await self._begin("open")

    async def present(self, names: Sequence[str]) -> list[bool]:
        await self._begin("present", *names)
        return [name in self._world.values for name in names]

    async def get(self, name: str) -> bytes | None:
        await self._begin("get", name)
        await asyncio.sleep(self._world.slow_s)
        return self._world.values.get(name)

    async def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        await self._begin("get_many", *names)
        return [self._world.values.get(name) for name in names]

    async def get_head(self, name: str, nbytes: int) -> bytes | None:
        await self._begin("get_head", name)
        found = self._world.values.get(name)
        return None if found is None else found[:nbytes]

    async def put(self, name: str, data: Any) -> None:
        await self._begin("put", name, write=True)
        self._world.values[name] = bytes(data)

    async def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        await self._begin("swap", name, write=True)
        if self._world.values.get(name) != expected:
            return False
        self._world.values[name] = data
        return True

    async def delete(self, names: Sequence[str]) -> int:
        await self._begin("delete", *names)
        return sum(self._world.values.pop(name, None) is not None for name in names)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        await self._begin("names", prefix)
        for name in list(self._world.values):
            if name.startswith(prefix):
                yield name

    async def capacity(self) -> Capacity:
        await self._begin("capacity")
        return Capacity()

    async def close(self) -> None:
        pass

    async def claim(self, name: str, owner: str, ttl_s: float) -> bool:
        await self._begin("claim", name, write=True)
        holder, until = self._world.claims.get(name, (owner, 0.0))
        if holder != owner and until > time.monotonic():
            return False
        self._world.claims[name] = (owner, time.monotonic() + ttl_s)
        return True

    async def unclaim(self, name: str, owner: str) -> None:
        await self._begin("unclaim", name)
        if self._world.claims.get(name, ("", 0.0))[0] == owner:
            del self._world.claims[name]

    async def _begin(self, method: str, *names: str, write: bool = False) -> None:
        world = self._world
        world.calls.append((method, names))
        while method in world.stuck:
            await asyncio.sleep(0.002)
        if world.down:
            raise BackendError("it is down", kind="down", remedy="start it")
        if write and world.full:
            raise BackendError("it is full", kind="full", remedy="make room")


class Machine:
    """One machine of several: an engine with its own tiers, and a client of one tenant."""

    def __init__(self, world: World, home: Path, name: str, settings: dict[str, Any], monkeypatch: Any) -> None:
        home.mkdir(exist_ok=True)
        secret = home / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        state = home / name
        # An answer takes no time here, but on a busy machine: who asks is to wait for it, unless a test says otherwise.
        shared = {"url": "valkey://in-this-process:1", "write": "all", "sync": "20ms", "probe_timeout": "10s"}
        shared |= settings.pop("shared", {})
        config = parse_config(
            {
                "state_dir": str(state),
                "secret": str(secret),
                "warm": {"capacity": "16MiB", "directory": str(home)},
                "cold": {"capacity": "64MiB"},
                "cluster": {"node": name},
                "shared": shared,
                **settings,
            }
        )
        monkeypatch.setattr("tierkv.storage.shared.make_backend", lambda url, **more: DictBackend(world))
        self.engine: Engine = build_engine(config)
        self.cache = EmbeddedCache(self.engine, "team")
        assert bounds(config)

    def close(self) -> None:
        self.engine.close()


@contextmanager
def machines(*found: Machine) -> Iterator[None]:
    try:
        yield
    finally:
        for machine in found:
            machine.close()


def store_of(machine: Machine) -> SharedStore:
    """The machine's store."""
    sharing = machine.engine._state.sharing
    assert sharing is not None
    return sharing._store
