"""Kernels, each beside the device's own copy of as many bytes, in turns. Speeds count bytes read and bytes written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.machine import Figure, Machine, Scale, Work, gbps, interleaved
from tierkv.kernels.checksum import checksums
from tierkv.kernels.coding import BlockShape, Float8, Scheme, Uniform
from tierkv.kernels.paged_caches import CacheLayout, PagedCaches, PayloadOrder
from tierkv.kernels.pages import gather_blocks, scatter_blocks
from tierkv.kernels.planes import gather_planes, merge_planes, planes_nbytes, scatter_planes, split_planes
from tierkv.kernels.quant import dequantize_pages, quantize_pages

__all__ = ["kernel_figures", "make_caches", "page_table"]

GATHER_TARGET, PLANES_TARGET = 0.9, 0.8
_SPARE = 5, 4  # the engine has a quarter more pages than are moved, and those that are moved lie anywhere


@dataclass(frozen=True, slots=True)
class _Layout:
    """How an engine keeps pages, and the payload order they are moved in."""

    title: str
    layout: CacheLayout
    heads_first: bool
    order: PayloadOrder


LAYOUTS = (
    _Layout("[2, pages, tokens, heads, dim] NHD", "2PNHD", False, "NHD"),
    _Layout("vLLM, tokens first, NHD", "PHN2D", False, "NHD"),
    _Layout("vLLM, heads first, NHD", "PHN2D", True, "NHD"),
    _Layout("vLLM, heads first, HND", "PHN2D", True, "HND"),
)


def make_caches(device: torch.device, scale: Scale, layout: CacheLayout, *, heads_first: bool) -> list[Tensor]:
    """Return an engine's tensors, one per layer, full of random numbers."""
    pages = scale.blocks * scale.pages_per_block * _SPARE[0] // _SPARE[1]
    rows = (scale.heads, scale.page_tokens) if heads_first else (scale.page_tokens, scale.heads)
    shape = (2, pages, *rows, scale.dim) if layout == "2PNHD" else (pages, *rows, 2 * scale.dim)
    whole = torch.empty(scale.layers, *shape, dtype=torch.bfloat16, device=device).normal_()
    # PHN2D wants heads before tokens, 2PNHD tokens before heads, whatever lies where.
    turned = heads_first == (layout == "2PNHD")
    return [layer.transpose(-3, -2) if turned else layer for layer in whole]


def page_table(scale: Scale, blocks: int) -> Tensor:
    """Return a block table of pages anywhere."""
    pages = scale.blocks * scale.pages_per_block * _SPARE[0] // _SPARE[1]
    return torch.randperm(pages)[: blocks * scale.pages_per_block].view(blocks, scale.pages_per_block)


def kernel_figures(machine: Machine, scale: Scale) -> Iterator[Figure]:
    """Measure all kernels."""
    device, total = machine.torch_device, scale.blocks * scale.block_bytes
    source, target = (torch.empty(total, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    yield Figure(
        "kernels",
        f"the device's copy of {total / 2**30:.2g} GiB",
        gbps(2 * total, interleaved({"copy": copy}, machine.kernel_seconds, machine.seconds_per_case)["copy"]),
        "GB/s",
        1.0,
    )
    payload = target.view(torch.bfloat16)
    for kind in LAYOUTS:
        yield from _moves(machine, scale, kind, payload, copy)
    yield from _planes(machine, scale, payload, copy)
    yield from _quantised(machine, scale, copy)
    yield from _sums(machine, scale, target, copy)


def _compared(
    machine: Machine,
    copy: Work,
    copied: int,
    works: Mapping[str, tuple[Work, float]],
    target: float | None = None,
) -> Iterator[Figure]:
    """Measure works, each with the bytes that it moves, and their ratio to the copy."""
    taken = interleaved(
        {"": copy, **{name: work for name, (work, _) in works.items()}},
        machine.kernel_seconds,
        machine.seconds_per_case * len(works),
    )
    for name, (work, moved) in works.items():
        speed = gbps(moved, taken[name])
        queueing = 1e3 * machine.seconds(work) - 1e3 * taken[name]
        yield Figure(
            "kernels",
            name,
            speed,
            "GB/s",
            speed / gbps(2 * copied, taken[""]),
            target,
            f"{1e3 * taken[name]:.3f} ms, and {max(0.0, queueing):.2f} to queue",
        )


def _moves(machine: Machine, scale: Scale, kind: _Layout, payload: Tensor, copy: Work) -> Iterator[Figure]:
    tensors = make_caches(machine.torch_device, scale, kind.layout, heads_first=kind.heads_first)
    caches, table = PagedCaches.of(tensors, kind.layout), page_table(scale, scale.blocks)
    blocks = payload.view(scale.blocks, *caches.payload_shape(scale.block_tokens, kind.order))
    yield from _compared(
        machine,
        copy,
        blocks.nbytes,
        {
            f"gather {kind.title}": (lambda: gather_blocks(caches, table, blocks, order=kind.order), 2 * blocks.nbytes),
            f"scatter {kind.title}": (
                lambda: scatter_blocks(blocks, table, caches, order=kind.order),
                2 * blocks.nbytes,
            ),
        },
        GATHER_TARGET,
    )


def _planes(machine: Machine, scale: Scale, payload: Tensor, copy: Work) -> Iterator[Figure]:
    device, shape = machine.torch_device, scale.block_shape
    caches = PagedCaches.of(make_caches(device, scale, "2PNHD", heads_first=False), "2PNHD")
    table, blocks = page_table(scale, scale.blocks), payload.view(scale.blocks, *shape)
    size = planes_nbytes(shape, torch.bfloat16, "NHD")
    buffers = torch.empty(scale.blocks, size, dtype=torch.uint8, device=device)
    moved = blocks.nbytes + buffers.nbytes
    yield from _compared(
        machine,
        copy,
        blocks.nbytes,
        {
            "split pages into planes": (lambda: gather_planes(caches, table, buffers, order="NHD"), moved),
            "merge planes into pages": (lambda: scatter_planes(buffers, table, caches, order="NHD"), moved),
            "split payloads into planes": (lambda: split_planes(blocks, buffers, order="NHD"), moved),
            "merge planes into payloads": (lambda: merge_planes(buffers, blocks, order="NHD"), moved),
        },
        PLANES_TARGET,
    )


def _quantised(machine: Machine, scale: Scale, copy: Work) -> Iterator[Figure]:
    device = machine.torch_device
    caches = PagedCaches.of(make_caches(device, scale, "2PNHD", heads_first=False), "2PNHD")
    table = page_table(scale, scale.blocks)
    shape = BlockShape(scale.layers, 2, scale.block_tokens, scale.heads, scale.dim)
    nbytes = scale.blocks * scale.block_bytes
    schemes: dict[str, tuple[Scheme, int]] = {
        "8-bit codes": (Uniform(shape, (1 / 8, 1 / 4)), 2),
        "fp8": (Float8(shape), 1),
    }
    for title, (scheme, reads) in schemes.items():
        coded = torch.empty(scale.blocks, scheme.nbytes, dtype=torch.uint8, device=device)
        yield from _compared(
            machine,
            copy,
            nbytes,
            {
                f"quantise pages, {title}": (
                    partial(quantize_pages, caches, table, scheme, coded),
                    reads * nbytes + coded.nbytes,
                ),
                f"dequantise pages, {title}": (
                    partial(dequantize_pages, coded, scheme, table, caches),
                    nbytes + coded.nbytes,
                ),
            },
        )


def _sums(machine: Machine, scale: Scale, memory: Tensor, copy: Work) -> Iterator[Figure]:
    blocks = list(memory.view(scale.blocks, -1).unbind(0))
    one = blocks[:1]
    moved = memory.nbytes * 9 / 8
    works = {
        f"checksums of {len(blocks)} blocks": (lambda: checksums(blocks), moved),
        "checksum of 1 block": (lambda: checksums(one), moved / len(blocks)),
    }
    yield from _compared(machine, copy, memory.nbytes, works)
