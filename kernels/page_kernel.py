"""The Triton kernel behind `tierkv.kernels.pages`: one launch moves the pages of many blocks and all their layers.

It copies words and does not know what they mean. Widths and strides are counted in units of 16 bytes whenever
everything is aligned to 16, so that the compiler can prove the alignment and emits 128-bit loads and stores; otherwise
in the largest smaller power of two that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierkv.kernels.page_move import PageMove

__all__ = ["PageGeometry", "move_pages"]

_WIDEST_UNIT = 16
_WIDEST_TILE = 1024
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def page_kernel(
    addresses: tl.tensor,
    pages_per_block: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Move one tile of one page of one layer's K or V.

    Grid: (tiles per run * page ids, layers * 2). `addresses` holds the payload's address, one address per layer, then
    the page ids (int64). A run is what one page holds of K or V: RUN words, contiguous in the payload; in the cache it
    is rows of WIDTH words, HEADS of them per token. Strides are in units of UNIT bytes.
    """
    WORDS: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    TILES: tl.constexpr = (RUN + TILE - 1) // TILE
    layers = tl.num_programs(1) // 2
    layer = tl.program_id(1) // 2
    plane = tl.program_id(1) % 2
    entry = tl.program_id(0) // TILES
    word = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)

    block = (entry // pages_per_block).to(tl.int64)
    run = (tl.program_id(1) * pages_per_block + entry % pages_per_block).to(tl.int64)
    payload = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(WORD)), UNIT)
    payload += block * block_stride * WORDS + run * RUN + word

    page = tl.load(addresses + 1 + layers + entry)
    cache = tl.multiple_of(tl.load(addresses + 1 + layer).to(tl.pointer_type(WORD)), UNIT)
    cache += (page * page_stride + plane.to(tl.int64) * plane_stride) * WORDS
    if WIDTH == RUN:
        cache += word
    else:
        row = word // WIDTH
        cache += (row // HEADS * token_stride + row % HEADS * head_stride) * WORDS + word % WIDTH

    # A null page has no live words: its address is never used.
    live = word < tl.where(page >= 0, RUN, 0)
    if GATHER:
        tl.store(payload, tl.load(cache, mask=live, other=0), mask=word < RUN)
    else:
        tl.store(cache, tl.load(payload, mask=live), mask=live)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How the kernel sees the pages of a move.

    Attributes
    ----------
    unit
        Bytes that every address, stride and width is a multiple of: 16, 8, 4, 2 or 1.
    run, width
        Bytes of K or V in a page, and of a piece of it that is contiguous in the cache.
    heads
        Pieces per token, when a token is not contiguous; else 1.
    page_stride, plane_stride, token_stride, head_stride, block_stride
        In bytes.
    """

    unit: int
    run: int
    width: int
    heads: int
    page_stride: int
    plane_stride: int
    token_stride: int
    head_stride: int
    block_stride: int

    @classmethod
    def of(cls, move: PageMove) -> PageGeometry:
        """Join axes that are contiguous in the cache, and find the widest unit."""
        view = move.pages[0]
        size = view.element_size()
        plane_stride, page_stride, token_stride, head_stride, _ = _byte_strides(view)
        _, _, tokens, heads, dim = view.shape
        width = dim * size
        run = tokens * heads * width
        if heads == 1 or head_stride == width:
            width, heads, head_stride = heads * width, 1, 0
            if tokens == 1 or token_stride == width:
                width, token_stride = run, 0
        strides = (page_stride, plane_stride, token_stride, head_stride, _byte_strides(move.payload)[0])
        addresses = (move.payload.data_ptr(), *(pages.data_ptr() for pages in move.pages))
        return cls(gcd(_WIDEST_UNIT, run, width, *strides, *addresses), run, width, heads, *strides)

    def constants(self, *, gather: bool) -> dict[str, object]:
        """Return the kernel's compile-time arguments."""
        word = min(self.unit, max(_WORDS))
        run = self.run // word
        return {
            "RUN": run,
            "WIDTH": self.width // word,
            "HEADS": self.heads,
            "UNIT": self.unit,
            "WORD": _WORDS[word],
            "TILE": min(_WIDEST_TILE, triton.next_power_of_2(run)),
            "GATHER": gather,
        }


def _byte_strides(tensor: Tensor) -> list[int]:
    """Return strides in bytes; 0 for axes of length 1, whose strides mean nothing and may be odd."""
    size = tensor.element_size()
    return [stride * size if n > 1 else 0 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)]


def move_pages(move: PageMove, *, gather: bool) -> None:
    """Queue a checked move on the current stream of its device: caches to payload, or back."""
    blocks, pages_per_block = move.table.shape
    if blocks == 0:
        return
    geometry = PageGeometry.of(move)
    constants = geometry.constants(gather=gather)
    pointers = torch.tensor([move.payload.data_ptr(), *(pages.data_ptr() for pages in move.pages)])
    addresses = torch.cat((pointers, move.table.flatten()))
    if move.payload.is_cuda:
        # From pageable memory the copy would wait for all that the stream has queued before.
        addresses = addresses.pin_memory().to(move.payload.device, non_blocking=True)
    tiles = triton.cdiv(geometry.run // min(geometry.unit, max(_WORDS)), constants["TILE"])
    with torch.cuda.device_of(move.payload):  # type: ignore[no-untyped-call]
        page_kernel[tiles * blocks * pages_per_block, len(move.pages) * 2](
            addresses,
            pages_per_block,
            geometry.page_stride // geometry.unit,
            geometry.plane_stride // geometry.unit,
            geometry.token_stride // geometry.unit,
            geometry.head_stride // geometry.unit,
            geometry.block_stride // geometry.unit,
            **constants,
        )
