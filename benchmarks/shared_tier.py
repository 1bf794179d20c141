"""The shared tier against the client it uses: 2 MiB blocks, 8 in flight, GB/s of payload.

    python benchmarks/shared_tier.py                                  a Redis of its own on this machine
    python benchmarks/shared_tier.py --gigabits 10                    the same behind a link of so many Gb/s each way
    python benchmarks/shared_tier.py valkey://host:6379               a server, or a cluster
    python benchmarks/shared_tier.py s3://bucket --option endpoint=http://host:8333 --option region=us-east-1 ...

The raw client puts and gets values that lie ready, and gets them into memory of its own choice; the tier codes, wraps
and verifies, and reads into the caller's buffers. All works take turns; medians. `stored` is payload over what it takes
in the engine. What is put is deleted again. A Redis of its own is filled first: one that still grows waits for the
kernel's pages, and evicting is what servers do that have run for a while.

The link is a model: values take their time on it one after another, the client's and the tier's alike, and both still
share this machine's cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierkv.errors import TierKVError
from tierkv.service.bench.measure import gbps, interleaved
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.spec import BlockLayout
from tierkv.storage.shared import Backend, SharedStore, SharedTier, make_backend
from tierkv.storage.shared.backend import Buffer
from tierkv.storage.shared.loop import acquire_loop, release_loop
from tierkv.storage.shared.valkey import ValkeyBackend
from tierkv.storage.tier import BlockMeta, checksum

MIB = 1 << 20
IN_FLIGHT = 8
PORT = 7390
MEMORY = 1 << 30
LRU_CLOCK_S = 2.0
"""What lies longer in a Redis than this is older to it than what comes now."""


def incompressible(block_bytes: int, number: int) -> Blocks:
    """Blocks in which no codec finds anything."""
    data = np.random.default_rng(0).integers(0, 256, (number, block_bytes), np.uint8)
    layout = BlockLayout("bfloat16", (block_bytes // 2,), 0)
    return Blocks(layout, data, [BlockMeta(block_bytes, checksum(row.data), layout=layout) for row in data])


class Wire:
    """One direction of a link: values take their time one after another."""

    def __init__(self, gigabits: float) -> None:
        self.bytes_per_s = gigabits * 1e9 / 8
        self.free_at = 0.0

    async def carry(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now) + nbytes / self.bytes_per_s
        await asyncio.sleep(self.free_at - now)


class Distant(ValkeyBackend):
    """A Valkey server behind a link."""

    def __init__(self, address: tuple[str, int], gigabits: float) -> None:
        super().__init__([address])
        self.there, self.back = Wire(gigabits), Wire(gigabits)

    async def put(self, name: str, data: Buffer) -> None:
        await asyncio.gather(self.there.carry(len(data)), super().put(name, data))

    async def get(self, name: str) -> Buffer | None:
        value = await super().get(name)
        if value is not None:
            await self.back.carry(len(value))
        return value


@dataclass
class Client:
    """The client alone: coroutines of the same event loop, as many at once as the tier has."""

    backend: Backend
    values: Sequence[bytes]
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self.passes = 0

    def put(self) -> None:
        self.passes += 1
        self._all(lambda at: self.backend.put(self._name(self.passes, at), self.values[at]))

    def get(self) -> None:
        self._all(lambda at: self.backend.get(self._name(self.passes, at)))

    def _name(self, number: int, at: int) -> str:
        return f"bench/raw/{number}-{at}"

    def close(self) -> None:
        for number in range(1, self.passes + 1):
            self._wait(self.backend.delete([self._name(number, at) for at in range(len(self.values))]))
        self._wait(self.backend.close())

    def open(self) -> None:
        self._wait(self.backend.open())

    def _all(self, ask: Callable[[int], Coroutine[Any, Any, object]]) -> None:
        left = iter(range(len(self.values)))

        async def one_after_another() -> None:
            for at in left:
                await ask(at)

        async def side_by_side() -> None:
            await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))

        self._wait(side_by_side())

    def _wait(self, coroutine: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class Tiered:
    """The tier: each put stores new blocks, each get reads the latest."""

    def __init__(self, tier: SharedTier, blocks: Blocks, codec: str) -> None:
        self.tier, self.blocks = tier, blocks
        self.metas = [meta._replace(codec=codec) for meta in blocks.metas]
        self.keys: list[bytes] = []
        self.old: list[bytes] = []
        self.out = [memoryview(bytearray(blocks.layout.nbytes)) for _ in blocks.data]

    def put(self) -> None:
        self.old += self.keys
        self.keys = [fresh_key() for _ in self.metas]
        rows = zip(self.keys, self.blocks.data, self.metas, strict=True)
        check(self.tier.put_many([(key, row.data, meta) for key, row, meta in rows]))

    def get(self) -> None:
        check(self.tier.read_many(list(zip(self.keys, self.out, strict=True))))

    def remove(self) -> None:
        for key in self.old + self.keys:
            self.tier.delete(key)

    def stored_ratio(self) -> float:
        usage = self.tier.survey()
        return usage.payload_bytes / usage.used_bytes


def check(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, TierKVError):
            raise outcome


def measure(make: Callable[[], Backend], block_bytes: int, number: int, rounds: int, threads: int, fill: int) -> None:
    kinds = {"like KV": Blocks.make(block_bytes, number), "random": incompressible(block_bytes, number)}
    loop = acquire_loop()
    raw = Client(make(), [row.tobytes() for row in kinds["random"].data], loop)
    raw.open()
    # The deadlines of a daemon are not what is measured here.
    store = SharedStore(make(), prefix="bench", probe_timeout_s=10, transfer_timeout_s=60, encode_threads=threads)
    store.open()
    try:
        for _ in range(-(-fill // (block_bytes * number))):
            raw.put()
        rows = {
            f"tier, {codec}, {kind}": Tiered(store.area(fresh_key()[:8], bytes(32)), blocks, codec)
            for codec in ("raw", "bx1")
            for kind, blocks in kinds.items()
        }
        for tiered in rows.values():
            tenant = tiered.tier.tenant
            tiered.metas = [meta._replace(tenant=tenant) for meta in tiered.metas]
        puts = interleaved({"client": raw.put, **{name: row.put for name, row in rows.items()}}, rounds=rounds)
        time.sleep(LRU_CLOCK_S)
        for put in (raw.put, *(row.put for row in rows.values())):
            put()  # an engine that evicts has them all now
        gets = interleaved({"client": raw.get, **{name: row.get for name, row in rows.items()}}, rounds=rounds)
        nbytes = block_bytes * number
        print(f"{number} blocks of {block_bytes >> 10} KiB, {IN_FLIGHT} in flight, {threads} coding threads")
        print(f"{'GB/s':24}{'put':>8}{'ratio':>8}{'get':>8}{'ratio':>8}{'stored':>8}")
        for name in puts:
            ratios = puts["client"] / puts[name], gets["client"] / gets[name]
            stored = f"{rows[name].stored_ratio():8.2f}" if name in rows else ""
            print(f"{name:24}{gbps(nbytes, puts[name]):8.2f}{ratios[0]:8.2f}{gbps(nbytes, gets[name]):8.2f}"
                  f"{ratios[1]:8.2f}{stored}")  # fmt: skip
        for tiered in rows.values():
            tiered.remove()
    finally:
        store.close()
        raw.close()
        release_loop()


@contextmanager
def own_redis() -> Iterator[str]:
    """Run a Redis that keeps nothing on disk, and no more than it needs in memory."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("there is no redis-server: name a server, see --help")
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        command = [program, "--port", str(PORT), "--save", "", "--appendonly", "no", "--dir", home]
        command += ["--maxmemory", str(MEMORY), "--maxmemory-policy", "allkeys-lru", "--maxmemory-samples", "64"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                yield f"valkey://127.0.0.1:{PORT}"
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="an engine; without one a Redis is started")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of an object store")
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="that code and decode")
    parser.add_argument("--gigabits", type=float, help="of a link to the Redis that is started")
    given = parser.parse_args()
    options = dict(option.split("=", 1) for option in given.option)
    size = given.block_kib << 10
    numbers = size, given.blocks, given.rounds, given.threads
    if given.url:
        measure(partial(make_backend, given.url, options=options), *numbers, fill=0)
        return
    with own_redis() as url:
        if given.gigabits:
            measure(partial(Distant, ("127.0.0.1", PORT), given.gigabits), *numbers, fill=MEMORY)
        else:
            measure(partial(make_backend, url), *numbers, fill=MEMORY)


if __name__ == "__main__":
    main()
