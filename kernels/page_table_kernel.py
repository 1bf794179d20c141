"""How a kernel finds pages and blocks: one table of addresses and page ids per launch.

The table is int64: an address per layer, an address per block, then the page ids, block by block. So layers and blocks
may lie anywhere, and a launch costs one small copy to the GPU. The device functions here are for every kernel that
moves pages, whatever it does to their values on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierkv.kernels.paged_caches import PagedCaches

__all__ = ["byte_strides", "cache_of_layer", "device_table", "page_in_cache", "payload_of_block"]


@triton.jit
def cache_of_layer(table: tl.tensor, layer: tl.tensor, WORD: tl.constexpr, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """Return a pointer to the first word of a layer's cache. ALIGNMENT: what its address is a multiple of, in bytes."""
    return tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(WORD)), ALIGNMENT)


@triton.jit
def page_in_cache(
    table: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    layer: tl.tensor,
    entry: tl.tensor,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a page id, negative for no page, and `cache_of_layer`. Entries are counted over all blocks."""
    return tl.load(table + layers + blocks + entry), cache_of_layer(table, layer, WORD, ALIGNMENT)


@triton.jit
def payload_of_block(
    table: tl.tensor, layers: tl.tensor, block: tl.tensor, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
) -> tl.tensor:
    """Return a pointer to the first word of a block."""
    return tl.multiple_of(tl.load(table + layers + block).to(tl.pointer_type(WORD)), ALIGNMENT)


def device_table(caches: PagedCaches, table: Tensor, payloads: Sequence[Tensor]) -> Tensor:
    """Return the kernel's table, on the device of the caches; `table` is int64 on the CPU. Does not wait for a GPU."""
    addresses = torch.tensor([tensor.data_ptr() for tensor in (*caches.pages, *payloads)], dtype=torch.int64)
    whole = torch.cat((addresses, table.flatten()))
    if caches.device.type != "cuda":
        return whole
    # From pageable memory the copy would wait for all that the stream has queued before.
    return whole.pin_memory().to(caches.device, non_blocking=True)


def byte_strides(tensor: Tensor) -> list[int]:
    """Return strides in bytes; 0 for axes of length 1, whose strides mean nothing and may be odd."""
    size = tensor.element_size()
    return [stride * size if n > 1 else 0 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)]
