"""From the disk to the GPU, stage by stage, in one thread: decoded by the processor alone, or planes merged there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.machine import Figure, Machine, Scale, gbps
from tierkv.kernels.planes import planes_nbytes
from tierkv.spec import BlockLayout
from tierkv.storage.cold import ColdTier
from tierkv.storage.device import Copy, DeviceBlock, finished
from tierkv.storage.device_decode import PlaneLoader, planes_room
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.tier import BlockMeta, checksum

__all__ = ["promotion_figures"]

_PATIENCE_S = 20.0


def promotion_figures(machine: Machine, scale: Scale) -> Iterator[Figure]:
    """Measure blocks of numbers like those of KV, stored by codec bx1, their file in the page cache."""
    layout = BlockLayout("bfloat16", scale.block_shape, 2)
    size, count = scale.block_bytes, scale.carried
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        capacity = max(64 << 20, 4 * count * size)
        cold = ColdTier(home, capacity_bytes=capacity, segment_bytes=capacity // 4, codec="bx1", sync="none")
        hot = DeviceHotTier(4 * size, device=machine.door, superblock_bytes=4 * size)
        hot.pool.patience_s = _PATIENCE_S
        keys = [number.to_bytes(32, "big") for number in range(count)]
        for key in keys:
            payload = _payload(scale)
            cold.put(key, payload, BlockMeta(size, checksum(payload), layout=layout, codec="bx1"))
        ratio = count * size / cold.describe()["stored_bytes"]
        yield Figure("promotion", "raw bytes per stored byte", ratio, "x")
        loader = PlaneLoader(hot, cold, size, merge=machine.merge, sums=machine.sums)
        slot = hot.allocate(size)
        whole, planes = memoryview(bytearray(size)), memoryview(bytearray(planes_room(size)))
        near = machine.door.allocate(planes_room(size))
        host = machine.pinned(planes_room(size))
        stream = machine.door.stream()
        nbytes = planes_nbytes(scale.block_shape, torch.bfloat16, "NHD")

        def across() -> None:
            stream.copy([Copy(near, host.data_ptr(), nbytes)])
            assert finished(stream.record(), _PATIENCE_S)

        def merge() -> None:
            machine.merge(DeviceBlock(machine.door.name, near, nbytes), hot.device_block(slot, size), layout)

        def by_processor(key: bytes) -> None:
            cold.read_into(key, whole)
            hot.copy_in([(slot, whole)]).wait()
            machine.sums([hot.device_block(slot, size)])

        def planes_first(key: bytes) -> None:
            assert loader.load(key, slot) is not None

        stages: dict[str, Callable[[bytes], object]] = {
            "read and undo Huffman coding": lambda key: cold.read_planes(key, planes),
            "planes across the bus": lambda _: across(),
            "merge in the slot": lambda _: merge(),
            "sum in the slot": lambda _: machine.sums([hot.device_block(slot, size)]),
            "all, planes first": planes_first,
            "read, decode, verify on the processor": lambda key: cold.read_into(key, whole),
            "all, by the processor": by_processor,
        }
        taken: dict[str, list[float]] = {name: [] for name in stages}
        began, turn = time.perf_counter(), 0
        while turn < 2 * count and (turn < 3 or time.perf_counter() - began < 3 * machine.seconds_per_case):
            for name, stage in stages.items():
                key = keys[turn % count]
                taken[name].append(machine.seconds(partial(stage, key)))
            turn += 1
        slower = median(taken["all, by the processor"][1:])
        for name, times in taken.items():
            seconds = median(times[1:])  # the first one compiles
            times_as_fast = slower / seconds if name.startswith("all") else None
            note = f"{1e3 * seconds:.3f} ms per block of {size / 2**20:.3g} MiB"
            yield Figure("promotion", name, gbps(size, seconds), "GB/s", times_as_fast, None, note)
        loader.close()
        stream.close()
        machine.door.free(near)
        hot.close()
        cold.close()


def _payload(scale: Scale) -> bytes:
    """Normal numbers, of another size in every channel, as keys and values are."""
    layers, planes, tokens, heads, dim = scale.block_shape
    sizes = torch.exp(torch.randn(layers, planes, 1, heads, dim))
    numbers = torch.randn(layers, planes, tokens, heads, dim).mul_(sizes).to(torch.bfloat16)
    return numbers.view(torch.uint8).numpy().tobytes()
