"""Launches of the plane kernels: layouts, orders and dtypes."""

from __future__ import annotations

import torch

from tests.kernels.aot.case import Case, Limits
from tests.kernels.aot.cases.pages import BLOCKS, PAGES, PAGES_PER_BLOCK, paged, table
from tierkv.kernels.paged_caches import CacheLayout, PayloadOrder
from tierkv.kernels.plane_kernel import merge_into_pages, split_from_pages
from tierkv.kernels.plane_move import PlaneSizes, plan_merge, plan_split

# name: layout, cache shape, dtype, order of the payload
CASES_OF: dict[str, tuple[CacheLayout, tuple[int, ...], torch.dtype, PayloadOrder]] = {
    "2PNHD bf16 8x128": ("2PNHD", (2, PAGES, 16, 8, 128), torch.bfloat16, "NHD"),
    "P2NHD bf16 8x128, HND": ("P2NHD", (PAGES, 2, 16, 8, 128), torch.bfloat16, "HND"),
    "PHN2D bf16 3x80": ("PHN2D", (PAGES, 3, 16, 160), torch.bfloat16, "NHD"),
    "PND bf16 576": ("PND", (PAGES, 64, 576), torch.bfloat16, "NHD"),
    "2PNHD fp8 8x128": ("2PNHD", (2, PAGES, 16, 8, 128), torch.float8_e4m3fn, "NHD"),
    "2PNHD fp32 8x128": ("2PNHD", (2, PAGES, 16, 8, 128), torch.float32, "NHD"),
}


def case(name: str, *, split: bool) -> Case:
    layout, shape, dtype, order = CASES_OF[name]
    caches = paged(layout, shape, dtype)
    block = caches.payload_shape(PAGES_PER_BLOCK * caches.page_tokens, order)
    sizes = PlaneSizes.of(block, dtype, order)

    def launch() -> None:
        buffers = torch.empty(BLOCKS, sizes.nbytes, dtype=torch.uint8)
        if split:
            split_from_pages(plan_split(caches, table(), buffers, order))
        else:
            merge_into_pages(plan_merge(buffers, table(), caches, order))

    moved = BLOCKS * (torch.Size(block).numel() * dtype.itemsize + sum(sizes.sizes))
    if split:
        # The block's address, the layer's, and a page id in each of two loops; the peaks, two to a thread.
        limits = {"split_kernel": Limits(registers=64, loads={64: 4}, stores={16: 1})}
        return Case(f"gather_planes {name}", launch, moved, limits)
    return Case(f"scatter_planes {name}", launch, moved, {"merge_kernel": Limits(registers=48, loads={64: 3})})


CASES = tuple(case(name, split=split) for name in CASES_OF for split in (True, False))
