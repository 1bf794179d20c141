"""The Triton kernels behind `tierkv.kernels.planes`: pages to byte planes and back, in one launch each.

What the planes hold is defined by `tierkv.kernels.planes`; here are the same few integer operations per value. Values
are numbered in the order of the payload. Widths are counted in values, so that planes of bytes and the cache beside
them are each accessed 128 bits at a time where `dim`, strides and addresses allow it.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from tierkv.kernels.page_table_kernel import byte_strides, cache_of_layer, device_table, page_in_cache, payload_of_block
from tierkv.kernels.plane_move import PLANE_ALIGNMENT, PlaneMove

__all__ = ["merge_into_pages", "split_from_pages"]

_VALUES = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
_WIDEST = 16  # bytes
_MERGED_AT_ONCE = 2048
_SPLIT_AT_ONCE = 2048
_MOST_CHANNELS = 256
_UNSPECIALIZED = [
    "blocks",
    "pages_per_block",
    "page_stride",
    "plane_stride",
    "token_stride",
    "head_stride",
    "rest_at",
    "peaks_at",
    "residuals_at",
]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def merge_kernel(
    table: tl.tensor,
    blocks: tl.tensor,
    pages_per_block: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    rest_at: tl.tensor,
    peaks_at: tl.tensor,
    residuals_at: tl.tensor,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PLANES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    CACHE_ALIGNMENT: tl.constexpr,
    BUFFER_ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Merge one tile of one page of one layer's K or V (or latents).

    Grid: (tiles per page * page ids, layers * PLANES). Strides are in units of STEP values, where planes begin in units
    of 16 bytes, alignments of addresses in bytes.
    """
    RUN: tl.constexpr = TOKENS * HEADS * DIM
    TILES: tl.constexpr = (RUN + TILE - 1) // TILE
    run = tl.program_id(1).to(tl.int64)
    layers = tl.num_programs(1) // PLANES
    entry = tl.program_id(0) // TILES
    slot = entry % pages_per_block
    value = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    tokens = pages_per_block * TOKENS
    if HEADS_FIRST:
        head = value // (TOKENS * DIM)
        token = value // DIM % TOKENS
        at = (head * tokens + slot * TOKENS) * DIM + value % (TOKENS * DIM)
    else:
        head = value // DIM % HEADS
        token = value // (HEADS * DIM)
        at = slot * RUN + value

    page, cache = page_in_cache(table, layers, blocks, run // PLANES, entry, VALUE, CACHE_ALIGNMENT)
    cache += (page * page_stride + run % PLANES * plane_stride) * STEP
    cache += (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride) * STEP + value % DIM
    live = value < tl.where(page >= 0, RUN, 0)

    buffer = payload_of_block(table, layers, entry // pages_per_block, tl.uint8, BUFFER_ALIGNMENT)
    values = run * (tokens * (HEADS * DIM))
    peaks = tl.load(buffer + peaks_at * 16 + run * (HEADS * DIM) + (head * DIM + value % DIM), mask=live)
    codes = peaks - tl.load(buffer + residuals_at * 16 + values + at, mask=live)
    if VALUE.primitive_bitwidth == 8:
        tl.store(cache, codes, mask=live)
    else:
        rest = tl.load(buffer + rest_at * 16 + values + at, mask=live)
        # Widening a signed byte repeats its sign up to bit 15, where the half wants it.
        halves = (codes.to(tl.int16) << 7) | (rest.to(tl.int8, bitcast=True).to(tl.int16) & -0x7F81)
        if VALUE.primitive_bitwidth == 16:
            tl.store(cache, halves, mask=live)
        else:
            low = tl.load(buffer.to(tl.pointer_type(tl.uint16)) + values + at, mask=live)
            tl.store(cache, (halves.to(tl.int32) << 16) | low.to(tl.int32), mask=live)


@triton.jit
def split_tile(
    ids: tl.tensor,
    cache: tl.tensor,
    step: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    live_channels: tl.tensor,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the values of a block's tokens number `step` to `step + 1` times ROWS; the tokens; which values exist.

    `ids` points to the block's page ids, `cache` to the channels ``[1, channels]`` of page 0; a tile is ``[ROWS,
    channels]``. Tokens of null pages are zeros, and exist.
    """
    STEPS: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    page = tl.load(ids + step // STEPS)
    token = step % STEPS * ROWS + tl.arange(0, ROWS)[:, None]
    place = cache + (page * page_stride + token.to(tl.int64) * token_stride) * STEP
    values = tl.load(place, mask=(token < tl.where(page >= 0, TOKENS, 0)) & live_channels, other=0)
    return values, step // STEPS * TOKENS + token, (token < TOKENS) & live_channels


@triton.jit
def halves_of(values: tl.tensor, VALUE: tl.constexpr) -> tl.tensor:
    """Return the 16-bit words of values that have the exponent in them."""
    return (values >> 16).to(tl.int16) if VALUE.primitive_bitwidth == 32 else values


@triton.jit
def codes_of(values: tl.tensor, VALUE: tl.constexpr) -> tl.tensor:
    """Return the exponent codes of values, as bytes."""
    return values & 0x7F if VALUE.primitive_bitwidth == 8 else (halves_of(values, VALUE) >> 7).to(tl.uint8)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def split_kernel(
    table: tl.tensor,
    blocks: tl.tensor,
    pages_per_block: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    rest_at: tl.tensor,
    peaks_at: tl.tensor,
    residuals_at: tl.tensor,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PLANES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    CACHE_ALIGNMENT: tl.constexpr,
    BUFFER_ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Split all tokens of CHANNELS channels of one layer's K or V (or latents) of one block.

    Grid: (tiles of channels * blocks, layers * PLANES). Units as in `merge_kernel`. The tokens are read twice, for the
    peaks and for the planes; the second time they come from the L2 cache.
    """
    TILES: tl.constexpr = (HEADS * DIM + CHANNELS - 1) // CHANNELS
    STEPS: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    run = tl.program_id(1).to(tl.int64)
    layers = tl.num_programs(1) // PLANES
    block = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    head = channel // DIM
    live_channels = channel < HEADS * DIM
    tokens = pages_per_block * TOKENS
    ids = table + layers + blocks + block * pages_per_block

    cache = cache_of_layer(table, run // PLANES, VALUE, CACHE_ALIGNMENT)
    cache += (run % PLANES * plane_stride + head.to(tl.int64) * head_stride) * STEP + channel % DIM
    buffer = payload_of_block(table, layers, block, tl.uint8, BUFFER_ALIGNMENT)

    most = tl.zeros((ROWS, CHANNELS), tl.uint8)
    step = 0  # not a range: some versions' interpreters cannot take its end from an argument
    while step < pages_per_block * STEPS:
        values, token, live = split_tile(ids, cache, step, page_stride, token_stride, live_channels, TOKENS, STEP, ROWS)
        most = tl.maximum(most, codes_of(values, VALUE))
        step += 1
    peaks = tl.max(most, axis=0, keep_dims=True).to(tl.uint8)
    tl.store(buffer + peaks_at * 16 + run * (HEADS * DIM) + channel, peaks, mask=live_channels)

    first_value = run * (tokens * (HEADS * DIM))
    step = 0
    while step < pages_per_block * STEPS:
        values, token, live = split_tile(ids, cache, step, page_stride, token_stride, live_channels, TOKENS, STEP, ROWS)
        if HEADS_FIRST:
            at = first_value + ((head * tokens + token) * DIM + channel % DIM)
        else:
            at = first_value + (token * (HEADS * DIM) + channel)
        if VALUE.primitive_bitwidth == 8:
            # A whole float8 is subtracted: modulo 256 its sign comes out as the residual's top bit.
            tl.store(buffer + residuals_at * 16 + at, peaks - values, mask=live)
        else:
            halves = halves_of(values, VALUE)
            rest = ((halves >> 8) & 0x80) | (halves & 0x7F)
            tl.store(buffer + residuals_at * 16 + at, peaks - codes_of(values, VALUE), mask=live)
            tl.store(buffer + rest_at * 16 + at, rest.to(tl.uint8), mask=live)
            if VALUE.primitive_bitwidth == 32:
                tl.store(buffer.to(tl.pointer_type(tl.int16)) + at, values.to(tl.int16), mask=live)
        step += 1


def _arguments(move: PlaneMove) -> dict[str, Any]:
    """Return the arguments that both kernels share."""
    caches = move.caches
    size = caches.dtype.itemsize
    plane_stride, page_stride, token_stride, head_stride, _ = byte_strides(caches.pages[0])
    strides = (page_stride, plane_stride, token_stride, head_stride)
    step = gcd(_WIDEST // size, caches.dim, *(stride // size for stride in strides))
    return {
        "table": device_table(caches, move.table, move.buffers),
        "blocks": len(move.buffers),
        "pages_per_block": move.table.shape[1],
        "page_stride": page_stride // size // step,
        "plane_stride": plane_stride // size // step,
        "token_stride": token_stride // size // step,
        "head_stride": head_stride // size // step,
        "rest_at": move.sizes.offset("rest") // PLANE_ALIGNMENT,
        "peaks_at": move.sizes.offset("peaks") // PLANE_ALIGNMENT,
        "residuals_at": move.sizes.offset("residuals") // PLANE_ALIGNMENT,
        "TOKENS": caches.page_tokens,
        "HEADS": caches.heads,
        "DIM": caches.dim,
        "PLANES": caches.planes,
        "HEADS_FIRST": move.order == "HND",
        "VALUE": _VALUES[size],
        "STEP": step,
        "CACHE_ALIGNMENT": gcd(_WIDEST, *(pages.data_ptr() for pages in caches.pages)),
        "BUFFER_ALIGNMENT": gcd(_WIDEST, *(buffer.data_ptr() for buffer in move.buffers)),
    }


def merge_into_pages(move: PlaneMove) -> None:
    """Queue a checked move from planes to pages on the current stream of the caches' device."""
    if not move.buffers:
        return
    caches = move.caches
    run = caches.page_tokens * caches.heads * caches.dim
    tile = min(_MERGED_AT_ONCE, triton.next_power_of_2(run))
    grid = (triton.cdiv(run, tile) * move.table.numel(), caches.layers * caches.planes)
    with torch.cuda.device_of(caches.pages[0]):  # type: ignore[no-untyped-call]
        merge_kernel[grid](**_arguments(move), TILE=tile)


def split_from_pages(move: PlaneMove) -> None:
    """Queue a checked move from pages to planes on the current stream of the caches' device."""
    if not move.buffers:
        return
    caches = move.caches
    channels = min(_MOST_CHANNELS, triton.next_power_of_2(caches.heads * caches.dim))
    rows = min(_SPLIT_AT_ONCE // channels, triton.next_power_of_2(caches.page_tokens))
    tiles = triton.cdiv(caches.heads * caches.dim, channels)
    with torch.cuda.device_of(caches.pages[0]):  # type: ignore[no-untyped-call]
        split_kernel[tiles * len(move.buffers), caches.layers * caches.planes](
            **_arguments(move), ROWS=rows, CHANNELS=channels
        )
