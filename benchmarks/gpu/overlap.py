"""A load beside a prefill: how much of it is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil

import torch

from benchmarks.gpu.kernels import make_caches, page_table
from benchmarks.gpu.machine import Figure, Machine, Scale, interleaved
from benchmarks.gpu.transfers import arena, device_pages
from tierkv.kernels.paged_caches import PagedCaches
from tierkv.kernels.pages import scatter_blocks
from tierkv.storage.device_pool import DevicePool

__all__ = ["overlap_figures"]

HIDDEN_TARGET = 80.0
_Load = tuple[Callable[[], object], Callable[[], None]]
"""What loads, and what gives its memory back."""


def overlap_figures(machine: Machine, scale: Scale) -> Iterator[Figure]:
    """Measure a prefill of matrix products, loads of as many tokens, and both at once."""
    count = min(scale.carried, ceil(scale.prefill_tokens / scale.block_tokens))
    size = scale.block_bytes
    prefill = _prefill(machine, scale)
    with arena(count * size) as memory, ThreadPoolExecutor(1) as thread:
        blocks = [memory[start : start + size] for start in range(0, count * size, size)]
        loads: dict[str, Callable[[], _Load]] = {
            "through the hot tier": lambda: _through_pool(machine, scale, memory, blocks),
            "into pages at once": lambda: _into_pages(machine, scale, blocks),
        }
        for name, make in loads.items():
            load, close = make()

            def both(load: Callable[[], object] = load) -> None:
                loading = thread.submit(load)
                prefill()
                machine.synchronize()
                loading.result()

            seconds = interleaved(
                {"prefill": prefill, "load": load, "both": both}, machine.seconds, 3 * machine.seconds_per_case
            )
            exposed = seconds["both"] - seconds["prefill"]
            yield Figure(
                "overlap",
                f"{count * scale.block_tokens} tokens {name}",
                100 * (1 - exposed / seconds["load"]),
                "% hidden",
                None,
                HIDDEN_TARGET,
                ", ".join(f"{name} {1e3 * taken:.1f} ms" for name, taken in seconds.items()),
            )
            close()


def _prefill(machine: Machine, scale: Scale) -> Callable[[], object]:
    """Return matrix products that take as much arithmetic as a prefill, on the current stream."""
    tokens, width = scale.prefill_tokens, scale.prefill_width
    states, weights = (
        torch.empty(rows, width, dtype=torch.bfloat16, device=machine.torch_device).normal_()
        for rows in (tokens, width)
    )
    product = torch.empty_like(states)
    times = max(1, round(scale.prefill_flop / (2 * tokens * width * width)))

    def prefill() -> None:
        for _ in range(times):
            torch.mm(states, weights, out=product)

    return prefill


def _through_pool(machine: Machine, scale: Scale, memory: memoryview, blocks: list[memoryview]) -> _Load:
    """Warm arena to hot tier in one batch, then a kernel from there to the engine's pages."""
    size = scale.block_bytes
    total = len(blocks) * size
    pool = DevicePool.allocate(machine.door, total)
    pool.patience_s = 60.0
    pool.copies_from(memory)
    caches = PagedCaches.of(make_caches(machine.torch_device, scale, "PHN2D", heads_first=False), "PHN2D")
    table = page_table(scale, len(blocks))
    payloads = [
        machine.tensor(pool.block(number * size, size)).view(torch.bfloat16).view(scale.block_shape)
        for number in range(len(blocks))
    ]
    aside = machine.stream()

    def load() -> None:
        pool.copy_in(zip(range(0, total, size), blocks, strict=True)).wait()
        with machine.on(aside):
            scatter_blocks(payloads, table, caches, order="NHD")
        machine.wait_for(aside)

    return load, pool.close


def _into_pages(machine: Machine, scale: Scale, blocks: list[memoryview]) -> _Load:
    """From the arena block by block, as an engine does without a hot tier."""
    pages = device_pages(machine, scale)
    table = page_table(scale, len(blocks)).tolist()

    def load() -> None:
        for block, ids in zip(blocks, table, strict=True):
            pages.load(block, ids)

    return load, lambda: None
