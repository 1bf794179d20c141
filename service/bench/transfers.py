"""Blocks between an engine's process and a daemon's: through shared memory and as HTTP bodies."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierkv.cache import Cache, Chain
from tierkv.errors import NotFound
from tierkv.service.bench.loopback import receive
from tierkv.service.bench.measure import gbps, interleaved, memcpy
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.service.bench.redis import Redis
from tierkv.spec import KVGroup, KVSpec

__all__ = ["TransferRow", "Transfers", "measure_transfers", "spec_of"]


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Speeds in GB/s for blocks of `block_bytes`, `batch` to a chain.

    Attributes
    ----------
    put_gbps
        `reserve`, `write`, `commit`.
    get_gbps
        `acquire`, then `read_into` (shared memory) or `view` (bodies, which arrive in memory of the caller's own),
        `release`; verified.
    yardstick_gbps
        In the same rounds: numpy copying the same blocks (shared memory); a raw stream of as many bytes (bodies).
    """

    block_bytes: int
    batch: int
    put_gbps: float
    get_gbps: float
    yardstick_gbps: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """Rows of one block size, by way; `redis` is empty where there is none, and its yardstick is memcpy."""

    shm: list[TransferRow]
    http: list[TransferRow]
    redis: list[TransferRow]


def spec_of(blocks: Blocks) -> KVSpec:
    """Return a namespace for blocks of this layout."""
    layers, _, tokens, heads, dim = blocks.layout.shape
    return KVSpec("bench", "0", "bfloat16", tokens, (KVGroup(tuple(range(layers)), "full", heads, dim),))


def measure_transfers(
    shared: Cache,
    bodies: Cache,
    stream: socket.socket,
    redis: Redis | None,
    blocks: Blocks,
    *,
    batches: Sequence[int],
    rounds: int,
    warm_ups: int,
) -> Transfers:
    """Store and read all `blocks` in chains of each length, `rounds` times, every way. Blocks.

    The daemon's arena must hold several passes: storing then evicts older ones as in daily life. `warm_ups` passes are
    stored before, so that every page of it has been touched once by both processes.
    """
    namespace = shared.register(spec_of(blocks))
    bodies.register(spec_of(blocks))
    data = blocks.data
    out = np.zeros_like(data)
    works: dict[str, Callable[[], object]] = {
        "memcpy": memcpy(data, out),
        "loopback": lambda: receive(stream, out.reshape(-1).data),
    }
    for batch in batches:
        for name, cache, target in (("shm", shared, out), ("http", bodies, None)):
            stored: list[Chain] = []
            works[f"{name} put {batch}"] = partial(_put, cache, namespace, data, batch, stored)
            works[f"{name} get {batch}"] = partial(_get, cache, stored, batch, target)
        if redis is not None:
            keys: list[bytes] = []
            works[f"redis put {batch}"] = partial(redis.put, data, batch, keys)
            works[f"redis get {batch}"] = partial(redis.get, batch, keys)
    for _ in range(warm_ups):
        _put(shared, namespace, data, batches[-1], [])
    taken = interleaved(works, rounds=rounds)
    speed = {name: gbps(data.nbytes, once) for name, once in taken.items()}

    def rows(name: str, yardstick: str) -> list[TransferRow]:
        return [
            TransferRow(
                data.shape[1], batch, speed[f"{name} put {batch}"], speed[f"{name} get {batch}"], speed[yardstick]
            )
            for batch in batches
        ]

    return Transfers(rows("shm", "memcpy"), rows("http", "loopback"), [] if redis is None else rows("redis", "memcpy"))


def _put(cache: Cache, namespace: str, data: NDArray[np.uint8], batch: int, stored: list[Chain]) -> None:
    stored[:] = (Chain(namespace, tuple(fresh_key() for _ in range(batch))) for _ in range(len(data) // batch))
    for number, chain in enumerate(stored):
        with cache.reserve(chain) as write:
            for grant in write.granted:
                write.write(grant.index, data[number * batch + grant.index].data)
            write.commit()


def _get(cache: Cache, stored: Sequence[Chain], batch: int, out: NDArray[np.uint8] | None) -> None:
    for number, chain in enumerate(stored):
        _load(cache, chain, None if out is None else out[number * batch :])


def _load(cache: Cache, chain: Chain, out: NDArray[np.uint8] | None) -> None:
    """Read a chain into `out`; None: where the client puts it."""
    with cache.acquire(chain) as read:
        if read.hit_blocks != len(chain):
            raise NotFound("the benchmark's own blocks were evicted", remedy="report it as a fault of tierkv bench")
        for ref in read.blocks:
            if out is None:
                read.view(ref.index)
            else:
                read.read_into(ref.index, out[ref.index].data)
