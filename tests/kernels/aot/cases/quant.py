"""Launches of the quantisation kernels: both schemes, from and to payloads, and fused with pages."""

from __future__ import annotations

import torch

from tests.kernels.aot.case import Case, Limits
from tierkv.kernels import quant_launch
from tierkv.kernels.coding import BlockShape, Float8, Scheme, Uniform
from tierkv.kernels.paged_caches import CacheLayout, PagedCaches, PayloadOrder

LAYERS, BLOCKS, TOKENS, PAGE_TOKENS = 8, 8, 64, 16
PAGES = BLOCKS * TOKENS // PAGE_TOKENS

# Narrow loads: addresses (8 bytes), a layer's peak (2), steps and centers of channels or rows (1).
PARAMETERS = {64: 3, 16: 1}
UNIFORM = {
    "channel_steps_kernel": Limits(registers=96, loads={64: 3}),
    "channel_codes_kernel": Limits(registers=72, loads=PARAMETERS | {8: 3}),
    "row_steps_kernel": Limits(registers=48, loads={64: 2}, stores={16: 1}),
    "row_codes_kernel": Limits(registers=48, loads=PARAMETERS | {8: 1}),
}
FLOAT8 = {
    "float8_codes_kernel": Limits(registers=96, loads={64: 5}, stores={32: 1, 8: 1}),
    "float8_values_kernel": Limits(registers=48, loads={64: 3, 32: 1}),
}


def limits(scheme: Scheme, *, encode: bool) -> dict[str, Limits]:
    if isinstance(scheme, Float8):
        names = ["float8_codes_kernel" if encode else "float8_values_kernel"]
    else:
        names = ["channel_codes_kernel"] + ["channel_steps_kernel"] * encode
        if scheme.shape.planes == 2:
            names += ["row_codes_kernel"] + ["row_steps_kernel"] * encode
    return {name: (UNIFORM | FLOAT8)[name] for name in names}


def case(scheme: Scheme, dtype: torch.dtype, layout: CacheLayout | None, *, encode: bool) -> Case:
    """Code or restore BLOCKS blocks that lie in pages of `layout`, or as payloads."""
    shape = scheme.shape
    dims = {
        "2PNHD": (2, PAGES, PAGE_TOKENS, shape.heads, shape.dim),
        "PHN2D": (PAGES, shape.heads, PAGE_TOKENS, 2 * shape.dim),
        "PND": (PAGES, PAGE_TOKENS, shape.dim),
    }

    def launch() -> None:
        if layout is None:
            caches = PagedCaches.of_blocks(torch.empty(BLOCKS, *shape.payload, dtype=dtype), shape.order)
            table = torch.arange(BLOCKS)[:, None]
        else:
            caches = PagedCaches.of([torch.empty(dims[layout], dtype=dtype) for _ in range(LAYERS)], layout)
            table = torch.arange(PAGES).view(BLOCKS, -1)
        coded = torch.empty(BLOCKS, scheme.nbytes, dtype=torch.uint8)
        if encode:
            quant_launch.encode(caches, table, scheme, coded)
        else:
            quant_launch.decode(coded, scheme, table, caches)

    payload = BLOCKS * torch.Size(shape.payload).numel() * dtype.itemsize
    moved = payload * (2 if encode and isinstance(scheme, Uniform) else 1) + BLOCKS * scheme.nbytes
    verb = f"{'quantize' if encode else 'dequantize'}_{'pages' if layout else 'blocks'}"
    title = f"{verb} {type(scheme).__name__} {layout or shape.order} {str(dtype)[6:]} {shape.heads}x{shape.dim}"
    return Case(title, launch, moved, limits(scheme, encode=encode))


def kv(order: PayloadOrder) -> BlockShape:
    return BlockShape(LAYERS, 2, TOKENS, 8, 128, order)


LATENT = BlockShape(LAYERS, 1, TOKENS, 1, 576)

CASES = (
    case(Uniform(kv("NHD")), torch.bfloat16, "2PNHD", encode=True),
    case(Uniform(kv("NHD")), torch.bfloat16, "2PNHD", encode=False),
    case(Uniform(kv("HND")), torch.float32, "PHN2D", encode=True),
    case(Uniform(kv("HND")), torch.float32, "PHN2D", encode=False),
    case(Uniform(LATENT), torch.bfloat16, "PND", encode=True),
    case(Uniform(LATENT), torch.bfloat16, "PND", encode=False),
    case(Float8(kv("NHD")), torch.float16, None, encode=True),
    case(Float8(kv("NHD")), torch.float16, "2PNHD", encode=False),
)
