"""Small caches, a clock that jumps, gates before the disk, and the model they are all compared with.

The model knows nothing of slots, leases or policy. It names every block by a key that it derives itself, and says which
blocks are published, by whom, and with which bytes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.cache import Chain
from tierkv.keys import block_key, share_key, tenant_key
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.tier import Tier

__all__ = ["SCOPES", "SETUPS", "Block", "Clock", "Gate", "Model", "Place", "Setup"]

BLOCK_TOKENS = 128
SCOPES = {"red": "team", "blue": "team", "green": ""}
"""Tenants and the share scope each is in."""

Place = tuple[int, int]  # (index in the chain, KV group)


@dataclass(frozen=True, slots=True)
class Setup:
    """One draw of the configuration. Sizes in units of the largest block, `unit` bytes; 0: no such tier."""

    unit: int
    hot: int
    warm: int
    cold: int
    policy: str = "slru"
    demote_ahead: float = 0.25
    sizes: int = 1
    device: str = "cpu"

    def settings(self, directory: Path) -> dict[str, Any]:
        """The configuration of a cache in `directory`."""
        quotas = {"hot": 5 * self.unit, "warm": 7 * self.unit, "cold": 24 * self.unit}
        return {
            "state_dir": str(directory / "state"),
            "hot": {"capacity": self.hot * self.unit, "device": self.device, "policy": self.policy},
            "warm": {
                "capacity": self.warm * self.unit,
                "directory": str(directory),
                "policy": self.policy,
                "demote_ahead": self.demote_ahead,
            },
            "cold": {"capacity": self.cold * self.unit, "codec": "raw", "sync": "none"},
            "tenants": {
                "red": {"scope": "team", "weight": 3.0},
                "blue": {"scope": "team"},
                "green": {name: str(nbytes) for name, nbytes in quotas.items()},
            },
        }

    def specs(self) -> tuple[KVSpec, ...]:
        """Namespaces with one full group, with a window of one and a half blocks behind one, and with two full ones."""
        dim = self.unit // 1024
        full, small = KVGroup((0,), "full", 1, dim), KVGroup((1,), "full", 1, dim // self.sizes)
        window = KVGroup((1,), "sliding_window", 1, dim // self.sizes, BLOCK_TOKENS * 3 // 2)
        return tuple(
            KVSpec(f"machine-{n}", "w", "float32", BLOCK_TOKENS, groups)
            for n, groups in enumerate([(full,), (full, window), (full, small)])
        )


SETUPS = (
    Setup(65536, 0, 16, 80),
    Setup(65536, 0, 16, 80, "lru", 1.0),
    Setup(65536, 0, 16, 80, "slru", 0.0),
    Setup(65536, 0, 16, 0),
    Setup(65536, 0, 16, 0, "lru"),
    Setup(65536, 8, 16, 80),
    Setup(65536, 8, 16, 0, "lru"),
    Setup(65536, 8, 16, 80, device="cuda:0"),
    Setup(65536, 8, 16, 0, device="cuda:0"),
    Setup(262144, 0, 32, 96, sizes=2),  # two superblocks, two sizes of slots
)


class Clock:
    """Stands in for the module `time` in the cache's own modules: runs like it, and jumps when told to."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._replaced = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("tierkv.") and getattr(module, "time", None) is time
        ]
        for module in self._replaced:
            setattr(module, "time", self)  # noqa: B010

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds

    def restore(self) -> None:
        for module in self._replaced:
            setattr(module, "time", time)  # noqa: B010


class Gate:
    """Holds everybody who passes a method of the cold tier while it is shut."""

    def __init__(self, tier: Tier | None, name: str) -> None:
        self._opened = threading.Event()
        self._opened.set()
        if tier is None:
            return
        method: Callable[..., Any] = getattr(tier, name)

        def gated(*args: Any, **named: Any) -> Any:
            assert self._opened.wait(60.0)
            return method(*args, **named)

        setattr(tier, name, gated)

    @property
    def shut(self) -> bool:
        return not self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block that was written, the last of `chain`; `version` makes its bytes different from all others."""

    key: bytes
    parent: bytes
    chain: Chain
    group: int
    windowed: bool
    writer: str
    nbytes: int
    version: int

    @property
    def data(self) -> bytes:
        mark = self.key + self.version.to_bytes(8, "little")
        return (mark * (self.nbytes // len(mark) + 1))[: self.nbytes]


@dataclass(slots=True)
class Model:
    """What is published, and what will be once its predecessor is.

    Attributes
    ----------
    secret
        Server secret of the cache.
    specs
        By namespace.
    published, waiting
        By storage key.
    """

    secret: bytes
    specs: dict[str, KVSpec]
    published: dict[bytes, Block] = field(default_factory=dict)
    waiting: dict[bytes, Block] = field(default_factory=dict)
    versions: int = 0

    def key(self, tenant: str, chain: Chain, place: Place) -> bytes:
        scope = SCOPES[tenant]
        name = share_key(self.secret, scope) if scope else tenant_key(self.secret, tenant)
        return block_key(name, chain.hashes[place[0]], place[1])

    def block(self, tenant: str, chain: Chain, place: Place) -> Block:
        """A new version of a block."""
        self.versions += 1
        index, group = place
        spec = self.specs[chain.namespace]
        parent = self.key(tenant, chain, (index - 1, group)) if index else b""
        windowed = spec.groups[group].kind == "sliding_window"
        nbytes = spec.layout(group).nbytes
        key = self.key(tenant, chain, place)
        upto = Chain(chain.namespace, chain.hashes[: index + 1])
        return Block(key, parent, upto, group, windowed, tenant, nbytes, self.versions)

    def commit(self, blocks: Iterable[Block]) -> list[bytes]:
        """Publish blocks, or let them wait for their predecessors; return the keys that became published."""
        self.waiting.update((block.key, block) for block in blocks)
        done: list[bytes] = []
        while ready := [b for b in self.waiting.values() if b.windowed or not b.parent or b.parent in self.published]:
            for block in ready:
                self.published[block.key] = self.waiting.pop(block.key)
                done.append(block.key)
        return done

    def needed(self, namespace: str, length: int, groups: Collection[int] | None = None) -> Iterator[Place]:
        """The blocks that a prefix of `length` blocks needs."""
        spec = self.specs[namespace]
        for index in range(length):
            for group, kind in enumerate(spec.groups):
                if groups is not None and group not in groups:
                    continue
                if kind.kind == "full" or (index + 1) * BLOCK_TOKENS > length * BLOCK_TOKENS - kind.window:
                    yield index, group

    def hit(
        self, tenant: str, chain: Chain, groups: Collection[int] | None = None, among: Collection[bytes] | None = None
    ) -> int:
        """Longest prefix that is published; of which all is in `among`, if that is given."""
        there = self.published if among is None else among

        def whole(length: int) -> bool:
            return all(self.key(tenant, chain, p) in there for p in self.needed(chain.namespace, length, groups))

        return next(length for length in range(len(chain), -1, -1) if whole(length))
