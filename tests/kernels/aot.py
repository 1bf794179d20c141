"""Compile the kernels for NVIDIA architectures, with no GPU, and print what their PTX loads and stores, as JSON.

    TRITON_INTERPRET=0 python tests/kernels/aot.py

Compilation needs kernels that are not interpreted, so this is a program of its own.
"""

import json
import re
import sys
from collections import Counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierkv.kernels.page_kernel import PageGeometry, page_kernel
from tierkv.kernels.page_move import plan_gather

ARCHITECTURES = (80, 90, 100)
CASES = {
    # name: cache shape, dtype, first element within a 16-byte aligned allocation
    "NHD bf16 8x128": ((2, 4, 16, 8, 128), torch.bfloat16, 0),
    "NHD bf16 3x64": ((2, 4, 16, 3, 64), torch.bfloat16, 0),
    "NHD fp8 1x128": ((2, 4, 16, 1, 128), torch.float8_e4m3fn, 0),
    "HND bf16 8x128": ((4, 8, 16, 256), torch.bfloat16, 0),
    "HND bf16 3x80": ((4, 3, 16, 160), torch.bfloat16, 0),
    "HND fp32 3x64": ((4, 3, 128, 128), torch.float32, 0),
    "NHD bf16 8x128, 8 bytes off": ((2, 4, 16, 8, 128), torch.bfloat16, 4),
    "NHD bf16 8x128, 2 bytes off": ((2, 4, 16, 8, 128), torch.bfloat16, 1),
}
_BITS = re.compile(r"(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)\b")


def geometry(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> PageGeometry:
    """Let the launcher's own code look at buffers of that shape."""
    cache = torch.empty(first + torch.Size(shape).numel(), dtype=dtype)[first:].view(shape)
    tokens, heads, dim = shape[2:] if len(shape) == 5 else (shape[2], shape[1], shape[3] // 2)
    payload = torch.empty(1, 1, 2, tokens, heads, dim, dtype=dtype)
    return PageGeometry.of(plan_gather([cache], torch.zeros(1, 1, dtype=torch.int64), payload))


def widths(pages: PageGeometry, *, gather: bool, architecture: int) -> dict[str, dict[str, int]]:
    """Count the bulk loads and stores of a compiled kernel by width in bits."""
    constants = pages.constants(gather=gather)
    strides = ("page_stride", "plane_stride", "token_stride", "head_stride", "block_stride")
    signature = {"addresses": "*i64", "pages_per_block": "i32", **dict.fromkeys(strides, "i64")}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(page_kernel, signature, constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["ptx"]
    found = {"ld": Counter[int](), "st": Counter[int]()}
    for instruction, vector, bits in _BITS.findall(ptx):
        found[instruction][int(vector or 1) * int(bits)] += 1
    # Three loads fetch the payload's address, the layer's, and the page id.
    found["ld"][64] -= 3
    return {name: {str(bits): count for bits, count in counts.items() if count} for name, counts in found.items()}


def report() -> list[dict[str, object]]:
    """Compile every case in both directions for every architecture."""
    rows: list[dict[str, object]] = []
    for name, case in CASES.items():
        pages = geometry(*case)
        for direction in ("gather", "scatter"):
            for architecture in ARCHITECTURES:
                found = widths(pages, gather=direction == "gather", architecture=architecture)
                rows.append(
                    {"case": name, "unit": pages.unit, "kernel": direction, "sm": architecture, **found},
                )
    return rows


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
