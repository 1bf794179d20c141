"""The memory tiers beside memcpy: through the embedded cache, and alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import tierkv
from tierkv.cache import Cache, Chain
from tierkv.config import Config
from tierkv.errors import NotFound
from tierkv.service.bench.measure import gbps, interleaved, memcpy
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.hot import HotTier
from tierkv.storage.tier import SlotTier
from tierkv.storage.warm import WarmTier

__all__ = ["MemoryRow", "measure_memory"]

_ROOM = 4  # the cache has room for so many passes, so that storing evicts older ones as in daily life


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Speeds in GB/s for blocks of `block_bytes`, `batch` to a chain.

    Attributes
    ----------
    put_gbps, get_gbps
        Through the embedded cache: lease, copy, checksum, publish; lease, copy, verify.
    tier_put_gbps, tier_get_gbps
        The tier alone: slot, copy, publish; copy, verify.
    memcpy_gbps
        numpy copying the same blocks.
    checksum_percent
        What verifying adds to the time of the copy, in the tier alone.
    """

    block_bytes: int
    batch: int
    put_gbps: float
    get_gbps: float
    tier_put_gbps: float
    tier_get_gbps: float
    memcpy_gbps: float
    checksum_percent: float


def measure_memory(kind: Literal["hot", "warm"], blocks: Blocks, batch: int, rounds: int) -> MemoryRow:
    """Store and read all `blocks` in chains of `batch`, `rounds` times. Blocks.

    One pass goes over all blocks, so that none is in the processor's cache because it was just used. A cache with a hot
    tier, here in ordinary memory, writes what it stores to the warm tier as well: a pass is over when that is done.
    Takes five times the size of the blocks in memory, with a hot tier nine times.
    """
    data = blocks.data
    layers, _, tokens, heads, dim = blocks.layout.shape
    spec = KVSpec("bench", "0", "bfloat16", tokens, (KVGroup(tuple(range(layers)), "full", heads, dim),))
    out = np.zeros_like(data)
    room = _ROOM * data.nbytes
    hot = {"capacity": room, "device": "cpu"} if kind == "hot" else {}
    config = Config.model_validate({"hot": hot, "warm": {"capacity": room}})
    path = config.warm.directory / f"tierkv-{os.getuid()}-{os.getpid()}-bench.{kind}"
    make = HotTier if kind == "hot" else WarmTier
    with tierkv.open(config) as cache, closing(make(room, segment_path=path)) as tier:
        namespace = cache.register(spec)
        stored: list[Chain] = []
        keys = [fresh_key() for _ in data]

        def put() -> None:
            stored[:] = (Chain(namespace, _hashes(batch)) for _ in range(len(data) // batch))
            for number, chain in enumerate(stored):
                _store(cache, chain, data[number * batch :])
            cache.flush()

        def get() -> None:
            for number, chain in enumerate(stored):
                _load(cache, chain, out[number * batch :])

        def tier_put() -> None:
            for key, payload, meta in blocks.items(keys):
                tier.delete(key)
                tier.put(key, payload, meta)

        taken = interleaved(
            {
                "memcpy": memcpy(data, out),
                "put": put,
                "get": get,
                "tier_put": tier_put,
                "tier_get": lambda: _read(tier, keys, out),
                "tier_copy": lambda: _copy(tier, keys, out),
            },
            rounds=rounds,
        )
    speed = {name: gbps(data.nbytes, once) for name, once in taken.items()}
    return MemoryRow(
        data.shape[1],
        batch,
        speed["put"],
        speed["get"],
        speed["tier_put"],
        speed["tier_get"],
        speed["memcpy"],
        100 * (taken["tier_get"] / taken["tier_copy"] - 1),
    )


def _hashes(batch: int) -> tuple[bytes, ...]:
    return tuple(fresh_key() for _ in range(batch))


def _store(cache: Cache, chain: Chain, data: NDArray[np.uint8]) -> None:
    with cache.reserve(chain) as write:
        for grant in write.granted:
            write.write(grant.index, data[grant.index].data)
        write.commit()


def _load(cache: Cache, chain: Chain, out: NDArray[np.uint8]) -> None:
    with cache.acquire(chain) as read:
        if read.hit_blocks != len(chain):
            raise NotFound("the benchmark's own blocks were evicted", remedy="report it as a fault of tierkv bench")
        for ref in read.blocks:
            read.read_into(ref.index, out[ref.index].data)


def _read(tier: SlotTier, keys: Sequence[bytes], out: NDArray[np.uint8]) -> None:
    for row, key in enumerate(keys):
        tier.read_into(key, out[row].data)


def _copy(tier: SlotTier, keys: Sequence[bytes], out: NDArray[np.uint8]) -> None:
    for row, key in enumerate(keys):
        slot = tier.slot(key)
        assert slot is not None
        tier.read(slot, out[row].data)
