"""Across the bus and between processes: what the hot tier and an engine's pages make of it, beside plain copies."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu.kernels import make_caches, page_table
from benchmarks.gpu.machine import Figure, Machine, Scale, gbps, interleaved
from tierkv.engines.paged import payload_memory
from tierkv.engines.paged_device import DevicePages
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.device import address_of
from tierkv.storage.device_pool import DevicePool
from tierkv.storage.shm import SharedSegment

__all__ = ["arena", "device_pages", "pool_figures", "process_figures"]

HOST_TARGET = 0.9
_NEIGHBOUR_S = 60.0
_SHARED, _SPARE_BYTES = Path("/dev/shm"), 16 << 20


@contextmanager
def arena(nbytes: int) -> Iterator[memoryview]:
    """Shared memory as the warm tier has it, its pages written to; in a file on disk where there is too little."""
    home = _SHARED if shutil.disk_usage(_SHARED).free > nbytes + _SPARE_BYTES else Path(tempfile.gettempdir())
    segment = SharedSegment(home / f"tierkv-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}.bench", nbytes)
    try:
        torch.frombuffer(segment.data, dtype=torch.uint8).random_()
        yield segment.data
    finally:
        segment.close()


def device_pages(machine: Machine, scale: Scale) -> DevicePages:
    """Return an engine's pages."""
    group = KVGroup(tuple(range(scale.layers)), "full", scale.heads, scale.dim)
    spec = KVSpec("benchmark", "w", "bfloat16", scale.block_tokens, (group,), order="NHD")
    caches = make_caches(machine.torch_device, scale, "PHN2D", heads_first=False)
    return DevicePages(caches, spec, 0, scale.page_tokens)


def pool_figures(machine: Machine, scale: Scale) -> Iterator[Figure]:
    """Measure the hot tier's copies and those of an engine's pages against plain ones from page-locked memory."""
    size, total = scale.block_bytes, scale.carried * scale.block_bytes
    with arena(total) as memory:
        yield from _locking(machine, memory)
        pool = DevicePool.allocate(machine.door, total)
        pool.patience_s = 60.0
        pool.copies_from(memory)
        blocks = [memory[start : start + size] for start in range(0, total, size)]
        outs = [memoryview(bytearray(size)) for _ in blocks]
        plain, near = machine.pinned(total), torch.empty(total, dtype=torch.uint8, device=machine.torch_device)
        pages = device_pages(machine, scale)
        table = page_table(scale, scale.carried).tolist()
        staging = payload_memory(size, scale.carried, machine.torch_device)

        def load() -> None:
            for block, ids in zip(blocks, table, strict=True):
                pages.load(block, ids)

        places = range(0, total, size)

        def one_by_one() -> None:
            for item in zip(places, blocks, strict=True):
                pool.copy_in([item]).wait()

        inward = {
            "": lambda: near.copy_(plain, non_blocking=True),
            "arena to hot tier": lambda: pool.copy_in(zip(places, blocks, strict=True)).wait(),
            "arena to hot tier, block by block": one_by_one,
            "arena to an engine's pages": load,
        }
        outward = {
            "": lambda: plain.copy_(near, non_blocking=True),
            "hot tier to memory": lambda: pool.copy_out(zip(places, outs, strict=True)),
            "an engine's pages to staging": lambda: pages.start_save(list(zip(table, staging, strict=True))).wait(),
        }
        direct = {"arena to hot tier", "an engine's pages to staging"}
        for way, works in (("host to device", inward), ("device to host", outward)):
            taken = interleaved(works, machine.seconds, machine.seconds_per_case * len(works))
            yardstick = gbps(total, taken[""])
            yield Figure("bus", f"{way}, a plain copy of {total >> 20} MiB", yardstick, "GB/s", 1.0)
            for name in [name for name in works if name]:
                speed = gbps(total, taken[name])
                target, note = (HOST_TARGET, "") if name in direct else (None, "through buffers")
                note = "waits for each" if name.endswith("by block") else note
                yield Figure("bus", name, speed, "GB/s", speed / yardstick, target, note)
        machine.synchronize()
        pool.close()


def process_figures(machine: Machine, scale: Scale) -> Iterator[Figure]:
    """Measure what a second process gets out of a pool that this one exports."""
    total = scale.carried * scale.block_bytes
    pool = DevicePool.allocate(machine.door, total)
    asked = json.dumps({"handle": pool.export().hex(), "nbytes": total})
    done = subprocess.run(machine.neighbour(), input=asked, capture_output=True, text=True, timeout=_NEIGHBOUR_S)
    if done.returncode:
        raise RuntimeError(f"the second process ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    taken = json.loads(done.stdout.splitlines()[-1])
    speed, own = gbps(2 * total, taken["pool"]), gbps(2 * total, taken["own"])
    yield Figure("processes", "copy out of another process's pool", speed, "GB/s", speed / own, HOST_TARGET)
    yield Figure("processes", "attaching it", 1e3 * taken["attach"], "ms")
    pool.close()


def _locking(machine: Machine, memory: memoryview) -> Iterator[Figure]:
    address, door = address_of(memory), machine.door
    locking = machine.seconds(lambda: door.pin(address, len(memory)))
    door.unpin(address)
    yield Figure("bus", "page-locking the arena", 1e3 * locking / (len(memory) / 1e9), "ms/GB")
