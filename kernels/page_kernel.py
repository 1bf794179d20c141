"""The Triton kernel behind `tierkv.kernels.pages`: one launch moves the pages of many blocks and all their layers.

It copies words and does not know what they mean. Widths and strides are counted in units of 16 bytes whenever
everything is aligned to 16, so that the compiler can prove the alignment and emits 128-bit loads and stores; otherwise
in the largest smaller power of two that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from tierkv.kernels.page_move import PageMove
from tierkv.kernels.page_table_kernel import byte_strides, device_table, page_in_cache, payload_of_block

__all__ = ["PageGeometry", "move_pages"]

_WIDEST_UNIT = 16
_WIDEST_TILE = 1024
_WORDS_PER_THREAD = 8
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(
    do_not_specialize=[
        "blocks",
        "pages_per_block",
        "page_stride",
        "plane_stride",
        "cache_outer",
        "cache_inner",
        "plane_size",
        "slot_stride",
        "block_outer",
        "block_inner",
    ]
)
def page_kernel(
    table: tl.tensor,
    blocks: tl.tensor,
    pages_per_block: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    cache_outer: tl.tensor,
    cache_inner: tl.tensor,
    plane_size: tl.tensor,
    slot_stride: tl.tensor,
    block_outer: tl.tensor,
    block_inner: tl.tensor,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Move one tile of one page of one layer's K or V (or latents).

    Grid: (tiles per run * page ids, layers * PLANES). A run is what one page holds of K or V: RUN words, in pieces of
    WIDTH that are contiguous on both sides, numbered in the order of the payload, INNER of them per step of the outer
    axis. Strides are in units of UNIT bytes.
    """
    WORDS: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    TILES: tl.constexpr = (RUN + TILE - 1) // TILE
    run = tl.program_id(1)
    layers = tl.num_programs(1) // PLANES
    entry = tl.program_id(0) // TILES
    word = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)

    page, cache = page_in_cache(table, layers, blocks, run // PLANES, entry, WORD, UNIT)
    cache += (page * page_stride + (run % PLANES).to(tl.int64) * plane_stride) * WORDS
    payload = payload_of_block(table, layers, entry // pages_per_block, WORD, UNIT)
    payload += (run.to(tl.int64) * plane_size + (entry % pages_per_block).to(tl.int64) * slot_stride) * WORDS
    if WIDTH == RUN:
        cache += word
        payload += word
    else:
        row = word // WIDTH
        outer = (row // INNER).to(tl.int64)
        inner = (row % INNER).to(tl.int64)
        cache += (outer * cache_outer + inner * cache_inner) * WORDS + word % WIDTH
        payload += (outer * block_outer + inner * block_inner) * WORDS + word % WIDTH

    # A null page has no live words: its address is never used.
    live = word < tl.where(page >= 0, RUN, 0)
    if GATHER:
        tl.store(payload, tl.load(cache, mask=live, other=0), mask=word < RUN)
    else:
        tl.store(cache, tl.load(payload, mask=live), mask=live)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How the kernel sees the pages of a move. All but `unit` and `inner` are in bytes.

    Attributes
    ----------
    unit
        Bytes that every address, stride and width is a multiple of: 16, 8, 4, 2 or 1.
    run, width
        What a page holds of K or V, and a piece of it that is contiguous on both sides.
    inner
        Pieces per step of the outer axis.
    page_stride, plane_stride, cache_outer, cache_inner
        In the cache; outer and inner are the payload's axes, so for NHD token and head.
    plane_size, slot_stride, block_outer, block_inner
        In the payload; from one page of a block to the next it is a slot.
    """

    unit: int
    run: int
    width: int
    inner: int
    page_stride: int
    plane_stride: int
    cache_outer: int
    cache_inner: int
    plane_size: int
    slot_stride: int
    block_outer: int
    block_inner: int

    @classmethod
    def of(cls, move: PageMove) -> PageGeometry:
        """Join axes that are contiguous on both sides, and find the widest unit."""
        caches, block = move.caches, move.payloads[0]
        plane_stride, page_stride, *cache_axes, _ = byte_strides(caches.pages[0])
        _, _, *block_axes, _ = byte_strides(block)
        width = caches.dim * block.element_size()
        axes = list(zip((caches.page_tokens, caches.heads), cache_axes, block_axes, strict=True))
        slot_stride = caches.page_tokens * block_axes[0]
        run = caches.page_tokens * caches.heads * width
        if move.order == "HND":
            axes.reverse()
        while axes and (axes[-1][0] == 1 or axes[-1][1:] == (width, width)):
            width *= axes.pop()[0]
        (_, cache_outer, block_outer), (inner, cache_inner, block_inner) = (*axes, (1, 0, 0), (1, 0, 0))[:2]
        plane_size = block[0, 0].numel() * block.element_size()
        sizes = (page_stride, plane_stride, cache_outer, cache_inner, plane_size, slot_stride, block_outer, block_inner)
        addresses = (tensor.data_ptr() for tensor in (*caches.pages, *move.payloads))
        return cls(gcd(_WIDEST_UNIT, run, width, *sizes, *addresses), run, width, inner, *sizes)

    def arguments(self) -> dict[str, int]:
        """Return the kernel's strides and sizes, in units."""
        names = (
            "page_stride",
            "plane_stride",
            "cache_outer",
            "cache_inner",
            "plane_size",
            "slot_stride",
            "block_outer",
            "block_inner",
        )
        return {name: getattr(self, name) // self.unit for name in names}

    def constants(self) -> dict[str, Any]:
        """Return the kernel's compile-time arguments."""
        word = min(self.unit, max(_WORDS))
        run = self.run // word
        return {
            "RUN": run,
            "WIDTH": self.width // word,
            "INNER": self.inner,
            "UNIT": self.unit,
            "WORD": _WORDS[word],
            "TILE": min(_WIDEST_TILE, triton.next_power_of_2(run)),
        }


def move_pages(move: PageMove, *, gather: bool) -> None:
    """Queue a checked move on the current stream of its device: caches to payloads, or back."""
    blocks, pages_per_block = move.table.shape
    if blocks == 0:
        return
    caches = move.caches
    geometry = PageGeometry.of(move)
    constants = geometry.constants()
    tiles = triton.cdiv(constants["RUN"], constants["TILE"])
    grid = (tiles * blocks * pages_per_block, caches.layers * caches.planes)
    with torch.cuda.device_of(caches.pages[0]):  # type: ignore[no-untyped-call]
        page_kernel[grid](
            device_table(caches, move.table, move.payloads),
            blocks,
            pages_per_block,
            **geometry.arguments(),
            **constants,
            PLANES=caches.planes,
            GATHER=gather,
            # Small pages get fewer threads, not threads with less to do.
            num_warps=min(4, max(1, constants["TILE"] // (32 * _WORDS_PER_THREAD))),
        )
