"""Launches of the page kernel: layouts, orders, dtypes and alignments."""

from __future__ import annotations

import torch

from tests.kernels.aot.case import Case, Limits
from tierkv.kernels.page_kernel import move_pages
from tierkv.kernels.page_move import plan_gather
from tierkv.kernels.paged_caches import CacheLayout, PagedCaches, PayloadOrder

LAYERS, BLOCKS, PAGES_PER_BLOCK = 32, 64, 4
PAGES = BLOCKS * PAGES_PER_BLOCK
# name: layout, cache shape, dtype, order of the payload, first element within an aligned allocation, bytes per access
CASES_OF: dict[str, tuple[CacheLayout, tuple[int, ...], torch.dtype, PayloadOrder, int, int]] = {
    "2PNHD bf16 8x128": ("2PNHD", (2, PAGES, 16, 8, 128), torch.bfloat16, "NHD", 0, 16),
    "2PNHD bf16 8x128, HND": ("2PNHD", (2, PAGES, 16, 8, 128), torch.bfloat16, "HND", 0, 16),
    "2PNHD bf16 3x64": ("2PNHD", (2, PAGES, 16, 3, 64), torch.bfloat16, "NHD", 0, 16),
    "2PNHD fp8 1x128": ("2PNHD", (2, PAGES, 16, 1, 128), torch.float8_e4m3fn, "NHD", 0, 16),
    "P2NHD bf16 8x128": ("P2NHD", (PAGES, 2, 16, 8, 128), torch.bfloat16, "NHD", 0, 16),
    "PHN2D bf16 8x128": ("PHN2D", (PAGES, 8, 16, 256), torch.bfloat16, "NHD", 0, 16),
    "PHN2D bf16 8x128, HND": ("PHN2D", (PAGES, 8, 16, 256), torch.bfloat16, "HND", 0, 16),
    "PHN2D bf16 3x80": ("PHN2D", (PAGES, 3, 16, 160), torch.bfloat16, "NHD", 0, 16),
    "PHN2D fp32 3x64, HND": ("PHN2D", (PAGES, 3, 128, 128), torch.float32, "HND", 0, 16),
    "PND bf16 576": ("PND", (PAGES, 64, 576), torch.bfloat16, "NHD", 0, 16),
    "2PNHD bf16 8x128, 8 bytes off": ("2PNHD", (2, PAGES, 16, 8, 128), torch.bfloat16, "NHD", 4, 8),
    "2PNHD bf16 8x128, 2 bytes off": ("2PNHD", (2, PAGES, 16, 8, 128), torch.bfloat16, "NHD", 1, 2),
}


def paged(layout: CacheLayout, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> PagedCaches:
    """Return caches of `LAYERS` layers that begin `first` elements into their allocations."""
    size = first + torch.Size(shape).numel()
    return PagedCaches.of([torch.empty(size, dtype=dtype)[first:].view(shape) for _ in range(LAYERS)], layout)


def table() -> torch.Tensor:
    return torch.arange(PAGES).view(BLOCKS, PAGES_PER_BLOCK)


def case(name: str, *, gather: bool) -> Case:
    layout, shape, dtype, order, first, unit = CASES_OF[name]
    caches = paged(layout, shape, dtype, first)
    block = caches.payload_shape(PAGES_PER_BLOCK * caches.page_tokens, order)

    def launch() -> None:
        move_pages(plan_gather(caches, table(), torch.empty(BLOCKS, *block, dtype=dtype), order), gather=gather)

    moved = 2 * BLOCKS * torch.Size(block).numel() * dtype.itemsize
    # Three loads fetch the block's address, the layer's, and the page id.
    limits = {"page_kernel": Limits(width=8 * unit, registers=48, loads={64: 3})}
    return Case(f"{'gather' if gather else 'scatter'}_blocks {name}", launch, moved, limits)


CASES = tuple(case(name, gather=gather) for name in CASES_OF for gather in (True, False))
