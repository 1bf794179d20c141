"""The Triton kernels behind `tierkv.kernels.quant` for the scheme `Float8`.

Conversions are integer arithmetic: GPUs before sm_89 have none of their own, and so all give the same bits. Arguments
are those of `quant_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierkv.kernels.page_table_kernel import page_in_cache, payload_of_block
from tierkv.kernels.quant_kernel import UNSPECIALIZED, magnitude_bits, narrow, widen

__all__ = ["float8_codes_kernel", "float8_values_kernel"]

_SMALLEST_SCALE = tl.constexpr(127 - 100)
_SMALLEST_NORMAL = tl.constexpr((127 - 6) << 23)


@triton.jit
def to_float8(values: tl.tensor) -> tl.tensor:
    """Return the bits of float8_e4m3fn, rounded to the nearest, ties to even, of magnitudes up to 448."""
    magnitude = magnitude_bits(values)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # added to 2**14, a magnitude is rounded to multiples of 2**-9, as denormals are
    denormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < _SMALLEST_NORMAL, denormal, normal)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float8(codes: tl.tensor) -> tl.tensor:
    """Return float32 values of the bits of float8_e4m3fn."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    bits = (magnitude << 20) + ((127 - 7) << 23)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    denormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, denormal, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def float8_codes_kernel(
    table: tl.tensor,
    fits: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
    PLANES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW_TOKEN: tl.constexpr,
    ROW_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Scale and code one head of one layer's K or V.

    Grid: (HEADS, blocks * layers * PLANES). `fits` is int8 ``[blocks, layers, planes, heads]``.
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    head = tl.program_id(0)
    plane = tl.program_id(1) % PLANES
    layer = tl.program_id(1) // PLANES % layers
    block = tl.program_id(1) // PLANES // layers
    dim = tl.arange(0, TILE)[None, :]
    offset = (plane.to(tl.int64) * plane_stride + head * head_stride) * PER_UNIT
    largest = tl.zeros((TOKENS, TILE), tl.int32)
    for nth_page in range(PAGES):
        page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
        values += page * page_stride * PER_UNIT + offset
        present = dim < tl.where(page >= 0, DIM, 0)
        for first in range(0, PAGE_TOKENS, TOKENS):
            token = first + tl.arange(0, TOKENS)[:, None]
            at_values = values + token * token_stride * PER_UNIT + dim
            value = widen(tl.load(at_values, mask=(token < PAGE_TOKENS) & present, other=0))
            largest = tl.maximum(largest, magnitude_bits(value))
    reach = tl.max(tl.max(largest, 1), 0)
    # 448 is 1.75 * 2**8: rounded up to a whole exponent, mantissas above .75 carry
    exponent = tl.minimum(tl.maximum(((reach + 0x1FFFFF) >> 23) - 8, _SMALLEST_SCALE), 226)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    coded = payload_of_block(table, layers, block, tl.uint8, 16)
    number = (layer * PLANES + plane) * HEADS + head
    tl.store((coded + SCALES).to(tl.pointer_type(tl.int32)) + number, exponent << 23)
    tl.store(fits + tl.program_id(1).to(tl.int64) * HEADS + head, (reach <= LIMIT).to(tl.int8))

    codes = coded + CODES + (layer.to(tl.int64) * PLANES + plane) * (PAGES * PAGE_TOKENS * HEADS * DIM)
    codes += head * (ROW_HEAD * DIM) + dim
    for nth_page in range(PAGES):
        page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
        values += page * page_stride * PER_UNIT + offset
        present = dim < tl.where(page >= 0, DIM, 0)
        for first in range(0, PAGE_TOKENS, TOKENS):
            token = first + tl.arange(0, TOKENS)[:, None]
            inside = token < PAGE_TOKENS
            at_values = values + token * token_stride * PER_UNIT + dim
            code = to_float8(widen(tl.load(at_values, mask=inside & present, other=0)) * inverse)
            tl.store(codes + (nth_page * PAGE_TOKENS + token) * (ROW_TOKEN * DIM), code, mask=inside & (dim < DIM))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def float8_values_kernel(
    table: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    PLANES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW_TOKEN: tl.constexpr,
    ROW_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Restore one head of one page of one layer's K or V.

    Grid: (HEADS * PAGES, blocks * layers * PLANES).
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    head = tl.program_id(0) % HEADS
    nth_page = tl.program_id(0) // HEADS
    plane = tl.program_id(1) % PLANES
    layer = tl.program_id(1) // PLANES % layers
    block = tl.program_id(1) // PLANES // layers
    dim = tl.arange(0, TILE)[None, :]
    coded = payload_of_block(table, layers, block, tl.uint8, 16)
    number = (layer * PLANES + plane) * HEADS + head
    scale = tl.load((coded + SCALES).to(tl.pointer_type(tl.float32)) + number)
    page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
    values += (page * page_stride + plane.to(tl.int64) * plane_stride + head * head_stride) * PER_UNIT + dim
    present = dim < tl.where(page >= 0, DIM, 0)
    codes = coded + CODES + (layer.to(tl.int64) * PLANES + plane) * (PAGES * PAGE_TOKENS * HEADS * DIM)
    codes += nth_page * (PAGE_TOKENS * ROW_TOKEN * DIM) + head * (ROW_HEAD * DIM) + dim
    for first in range(0, PAGE_TOKENS, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        inside = token < PAGE_TOKENS
        code = tl.load(codes + token * (ROW_TOKEN * DIM), mask=inside & (dim < DIM), other=0)
        value = narrow(from_float8(code) * scale, WORD)
        tl.store(values + token * token_stride * PER_UNIT, value, mask=inside & present)
