"""What is measured on, and how long work takes there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tierkv.storage.device import Device, DeviceBlock, open_device
from tierkv.storage.device_decode import Merge, merge_on_device
from tierkv.storage.landing import Sums, device_sums

__all__ = ["Figure", "Machine", "Scale", "Work", "gbps", "interleaved"]

Work = Callable[[], object]

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50
_HEAD_START_CYCLES = 20_000_000  # some 10 ms: longer than Python takes to queue any work here


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes. The defaults are those of an 8B model in bfloat16: 128 KiB per token, 8 MiB per block, 1 GiB in all."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    page_tokens: int = 16
    block_tokens: int = 64
    blocks: int = 128
    carried: int = 32
    prefill_tokens: int = 2048
    prefill_flop: float = 2 * 8e9 * 2048
    prefill_width: int = 4096

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of a payload, in the order NHD."""
        return (self.layers, 2, self.block_tokens, self.heads, self.dim)

    @property
    def block_bytes(self) -> int:
        return 2 * torch.Size(self.block_shape).numel()

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes
    ----------
    part, name
        Which.
    value, unit
        What was measured.
    ratio
        The same relative to the yardstick of its part, measured in turns with it.
    target
        What the ratio should be at least; where there is no ratio, the value.
    note
        What one should know about it.
    """

    part: str
    name: str
    value: float
    unit: str
    ratio: float | None = None
    target: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if (self.value if self.ratio is None else self.ratio) >= self.target else "short"


class Machine:
    """A GPU, as torch and as the door to the CUDA runtime know it.

    Parameters
    ----------
    name
        Such as ``cuda:0``. Raises `DeviceError` where there is none.
    seconds_per_case
        How long works that are compared are repeated.
    """

    merge: Merge = staticmethod(merge_on_device)

    def __init__(self, name: str, seconds_per_case: float) -> None:
        self.door: Device = open_device(name)
        self.torch_device = torch.device(self.door.name)
        torch.cuda.set_device(self.torch_device)
        self.seconds_per_case = seconds_per_case
        sums = device_sums()
        assert sums is not None, "torch is here, Triton is not"
        self.sums: Sums = sums

    def describe(self) -> str:
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return f"{name}, {total >> 30} GiB ({free >> 30} free), torch {torch.__version__}, CUDA {torch.version.cuda}"

    def tensor(self, block: DeviceBlock) -> Tensor:
        """Return device memory of the door as bytes."""
        return torch.as_tensor(block, device=self.torch_device)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stream(self) -> Any:
        """Return a stream beside the compute stream."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which kernels are queued on a stream."""
        return torch.cuda.stream(stream)

    def wait_for(self, stream: Any) -> None:
        stream.synchronize()

    def neighbour(self) -> list[str]:
        """Return the command line of a second process on this device."""
        return [sys.executable, "-m", "benchmarks.gpu.neighbour", self.door.name]

    def kernel_seconds(self, work: Work) -> float:
        """Return how long the device works on what `work` queues on the current stream, without the queueing."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def seconds(self, work: Work) -> float:
        """Return how long `work` takes from an idle device to an idle device."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began


def interleaved(works: Mapping[str, Work], clock: Callable[[Work], float], for_s: float) -> dict[str, float]:
    """Time works in turns, once to warm up and then for so many seconds; return the median of each."""
    for work in works.values():
        clock(work)
    taken: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for turn in range(_MOST_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() - began > for_s:
            break
        for name, work in works.items():
            taken[name].append(clock(work))
    return {name: median(times) for name, times in taken.items()}


def gbps(nbytes: float, seconds: float) -> float:
    """Return a speed in GB (1e9 bytes) per second."""
    return nbytes / seconds / 1e9
