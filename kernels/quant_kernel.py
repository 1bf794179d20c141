"""The Triton kernels behind `tierkv.kernels.quant`: statistics, codes and values of the scheme `Uniform`.

They read or write K and V where they lie in pages: K a tile of channels at a time, V a head at a time. Arithmetic is
that of the host's codec, operation by operation: sums over tokens in their order, IEEE division and square root, and no
fused multiply-add, which launches must ask for (``enable_fp_fusion=False``).

Arguments have the same meaning in every kernel:

    table           `page_table_kernel`'s, whose blocks are coded blocks
    *_stride        of pages, in UNITs of bytes
    PAGES, PAGE_TOKENS, HEADS, DIM      how many: of a block, a page, a token, a head
    ROW_TOKEN, ROW_HEAD                 rows of DIM from one token, and head, to the next in a payload
    CODES, STEPS, CENTERS_*, PEAKS      offsets of sections in a coded block, in bytes
    TOKENS, TILE    of tokens, and of channels or dims, that are taken at once
    WORD            dtype of K and V, int16 for bfloat16
    UNIT            bytes that all addresses and strides of pages are a multiple of
    LIMIT           bits of the largest magnitude that is coded, as a float32
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierkv.kernels.page_table_kernel import page_in_cache, payload_of_block

__all__ = [
    "UNSPECIALIZED",
    "channel_codes_kernel",
    "channel_steps_kernel",
    "row_codes_kernel",
    "row_steps_kernel",
]

UNSPECIALIZED = ["layers", "blocks", "page_stride", "plane_stride", "token_stride", "head_stride"]
"""Arguments for whose values nothing is compiled anew."""
_OF_K = [name for name in UNSPECIALIZED if name != "plane_stride"]

# A step's code is the upper bits of its float32: eight of exponent, three of mantissa.
_LOW_BITS = tl.constexpr(20)
_HALF = tl.constexpr(1 << 19)
_ALMOST = tl.constexpr((1 << 20) - 1)
_SMALLEST_CODE = tl.constexpr((127 - 100) << 3)
_UNFIT_CODE = tl.constexpr(0x7FFF)


@triton.jit
def widen(words: tl.tensor) -> tl.tensor:
    """Return float32 values; bfloat16 comes as int16."""
    if words.dtype == tl.int16:
        return (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return words.to(tl.float32)


@triton.jit
def narrow(values: tl.tensor, WORD: tl.constexpr) -> tl.tensor:
    """Round float32 values to the nearest, ties to even; bfloat16 becomes int16."""
    if tl.int16 == WORD:
        # the interpreter's own conversion truncates
        bits = values.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return values.to(WORD)


@triton.jit
def nearest(values: tl.tensor) -> tl.tensor:
    """Round magnitudes below 2**22 to integers, ties to even: rint, which the interpreter lacks."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def magnitude_bits(values: tl.tensor) -> tl.tensor:
    """Return integers that are ordered as the magnitudes are, NaN the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def step_code(wanted: tl.tensor, least: tl.tensor, magnitude: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Round steps to four bits, `least` upwards; the code of no step where a magnitude is beyond LIMIT's bits."""
    chosen = (wanted.to(tl.int32, bitcast=True) + _HALF) >> _LOW_BITS
    enough = (least.to(tl.int32, bitcast=True) + _ALMOST) >> _LOW_BITS
    code = tl.maximum(tl.maximum(chosen, enough), _SMALLEST_CODE)
    return tl.where(magnitude > LIMIT, _UNFIT_CODE, code).to(tl.int16)


@triton.jit
def load_steps(
    coded: tl.tensor, layer: tl.tensor, first: tl.tensor, live: tl.tensor, STEPS: tl.constexpr, PEAKS: tl.constexpr
) -> tl.tensor:
    """Return steps from number `first` on, which are layer `layer`'s."""
    peak = tl.load((coded + PEAKS).to(tl.pointer_type(tl.int16)) + layer).to(tl.int32)
    below = tl.load((coded + STEPS).to(tl.pointer_type(tl.uint8)) + first, mask=live, other=0).to(tl.int32)
    return ((peak - below) << _LOW_BITS).to(tl.float32, bitcast=True)


@triton.jit
def load_centers(
    coded: tl.tensor, channel: tl.tensor, live: tl.tensor, CENTERS_LOW: tl.constexpr, CENTERS_HIGH: tl.constexpr
) -> tl.tensor:
    low = tl.load((coded + CENTERS_LOW).to(tl.pointer_type(tl.uint8)) + channel, mask=live, other=0)
    return tl.load(coded + CENTERS_HIGH + channel, mask=live, other=0).to(tl.int32) * 256 + low.to(tl.int32)


@triton.jit
def load_tokens(
    values: tl.tensor, first: tl.tensor, token_stride: tl.tensor, live: tl.tensor, COUNT: tl.constexpr
) -> tl.tuple:
    """Load a tile of channels of COUNT tokens, as many tensors, so that their loads are in flight together."""
    loaded = ()
    for nth in tl.static_range(COUNT):
        loaded = loaded + (tl.load(values + (first + nth) * token_stride, mask=live, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=_OF_K)
def channel_steps_kernel(
    table: tl.tensor,
    chosen: tl.tensor,
    means: tl.tensor,
    fineness: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    LIMIT: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Choose the steps of a tile of channels of one layer's K, and tell their means.

    Grid: (tiles, blocks * layers). `chosen`, codes of steps, int16, and `means`, float32, are ``[blocks, layers,
    channels]``.
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    layer = tl.program_id(1) % layers
    first_entry = tl.program_id(1) // layers * PAGES
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    offset = channel // DIM * head_stride * PER_UNIT + channel % DIM

    total = tl.zeros((TILE,), tl.float32)
    magnitude = tl.zeros((TILE,), tl.int32)
    for nth_page in range(PAGES):
        page, values = page_in_cache(table, layers, blocks, layer, first_entry + nth_page, WORD, UNIT)
        values += page * page_stride * PER_UNIT + offset
        live = channel < tl.where(page >= 0, CHANNELS, 0)
        for first in range(0, PAGE_TOKENS, COUNT):
            words = load_tokens(values, first, token_stride * PER_UNIT, live, COUNT)
            for nth in tl.static_range(COUNT):
                value = widen(words[nth])
                total += value
                magnitude = tl.maximum(magnitude, magnitude_bits(value))
    mean = tl.div_rn(total, 1.0 * PAGES * PAGE_TOKENS)

    reach = tl.zeros((TILE,), tl.float32)
    square = tl.zeros((TILE,), tl.float32)
    for nth_page in range(PAGES):
        page, values = page_in_cache(table, layers, blocks, layer, first_entry + nth_page, WORD, UNIT)
        values += page * page_stride * PER_UNIT + offset
        live = channel < tl.where(page >= 0, CHANNELS, 0)
        for first in range(0, PAGE_TOKENS, COUNT):
            words = load_tokens(values, first, token_stride * PER_UNIT, live, COUNT)
            for nth in tl.static_range(COUNT):
                distance = tl.abs(widen(words[nth]) - mean)
                reach = tl.maximum(reach, distance)
                square += distance * distance
    deviation = tl.sqrt_rn(tl.div_rn(square, 1.0 * PAGES * PAGE_TOKENS))
    least = tl.maximum(tl.div_rn(reach, 126.0), tl.div_rn(tl.abs(mean), 32766.0))
    code = step_code(deviation * fineness, least, magnitude, LIMIT)
    target = tl.program_id(1).to(tl.int64) * CHANNELS + channel
    tl.store(chosen + target, code, mask=channel < CHANNELS)
    tl.store(means + target, mean, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=_OF_K)
def channel_codes_kernel(
    table: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    CODES: tl.constexpr,
    STEPS: tl.constexpr,
    CENTERS_LOW: tl.constexpr,
    CENTERS_HIGH: tl.constexpr,
    PEAKS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    CODE_TOKEN: tl.constexpr,
    CODE_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    ENCODE: tl.constexpr,
) -> None:
    """Code a tile of channels of one layer's K, or restore it. Steps and centers are in the coded block.

    Grid: (tiles, blocks * layers): each program divides once per channel, not once per page. CODE_TOKEN and CODE_HEAD
    are codes from one token, and head, to the next.
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    layer = tl.program_id(1) % layers
    block = tl.program_id(1) // layers
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = channel < CHANNELS
    coded = payload_of_block(table, layers, block, tl.int8, 16)
    step = load_steps(coded, layer, layer * CHANNELS + channel, live, STEPS, PEAKS)[None, :]
    center = load_centers(coded, layer * CHANNELS + channel, live, CENTERS_LOW, CENTERS_HIGH)[None, :]
    inverse = tl.div_rn(1.0, step)
    codes = coded + CODES + layer.to(tl.int64) * (PAGES * PAGE_TOKENS * CHANNELS)
    codes += (channel // DIM * CODE_HEAD + channel % DIM)[None, :]
    offset = (channel // DIM * head_stride * PER_UNIT + channel % DIM)[None, :]
    for nth_page in range(PAGES):
        page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
        values += page * page_stride * PER_UNIT + offset
        present = (channel < tl.where(page >= 0, CHANNELS, 0))[None, :]
        for first in range(0, PAGE_TOKENS, TOKENS):
            token = first + tl.arange(0, TOKENS)[:, None]
            inside = token < PAGE_TOKENS
            at_values = values + token * token_stride * PER_UNIT
            at_codes = codes + (nth_page * PAGE_TOKENS + token) * CODE_TOKEN
            if ENCODE:
                value = widen(tl.load(at_values, mask=inside & present, other=0))
                code = nearest(value * inverse) - center.to(tl.float32)
                tl.store(at_codes, code.to(tl.int8), mask=inside & live[None, :])
            else:
                code = tl.load(at_codes, mask=inside & live[None, :], other=0).to(tl.int32)
                value = (code + center).to(tl.float32) * step
                tl.store(at_values, narrow(value, WORD), mask=inside & present)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def row_steps_kernel(
    table: tl.tensor,
    chosen: tl.tensor,
    fineness: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    LIMIT: tl.constexpr,
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
    """Choose the steps of one head of one page of one layer's V.

    Grid: (HEADS * PAGES, blocks * layers). `chosen`, codes of steps, int16, are ``[blocks, layers, rows]``.
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    layer = tl.program_id(1) % layers
    block = tl.program_id(1) // layers
    nth_page = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dim = tl.arange(0, TILE)
    page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
    values += (page * page_stride + plane_stride + head * head_stride) * PER_UNIT
    present = dim < tl.where(page >= 0, DIM, 0)
    rows = chosen + tl.program_id(1).to(tl.int64) * (PAGES * PAGE_TOKENS * HEADS) + head * ROW_HEAD
    for first in range(0, PAGE_TOKENS, TOKENS):
        token = first + tl.arange(0, TOKENS)
        inside = token < PAGE_TOKENS
        at_values = values + (token * token_stride * PER_UNIT)[:, None] + dim[None, :]
        value = widen(tl.load(at_values, mask=inside[:, None] & present[None, :], other=0))
        square = tl.div_rn(tl.sum(value * value, 1), 1.0 * DIM)
        magnitude = tl.max(magnitude_bits(value), 1)
        least = tl.div_rn(magnitude.to(tl.float32, bitcast=True), 127.0)
        code = step_code(tl.sqrt_rn(square) * fineness, least, magnitude, LIMIT)
        tl.store(rows + (nth_page * PAGE_TOKENS + token) * ROW_TOKEN, code, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def row_codes_kernel(
    table: tl.tensor,
    layers: tl.tensor,
    blocks: tl.tensor,
    page_stride: tl.tensor,
    plane_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    CODES: tl.constexpr,
    STEPS: tl.constexpr,
    PEAKS: tl.constexpr,
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
    ENCODE: tl.constexpr,
) -> None:
    """Code one head of one page of one layer's V, or restore it. Steps are in the coded block.

    Grid: (HEADS * PAGES, blocks * layers).
    """
    PER_UNIT: tl.constexpr = UNIT // (WORD.primitive_bitwidth // 8)
    layer = tl.program_id(1) % layers
    block = tl.program_id(1) // layers
    nth_page = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dim = tl.arange(0, TILE)[None, :]
    coded = payload_of_block(table, layers, block, tl.int8, 16)
    page, values = page_in_cache(table, layers, blocks, layer, block * PAGES + nth_page, WORD, UNIT)
    values += (page * page_stride + plane_stride + head * head_stride) * PER_UNIT
    present = dim < tl.where(page >= 0, DIM, 0)
    first_row = layer * (PAGES * PAGE_TOKENS * HEADS) + nth_page * PAGE_TOKENS * ROW_TOKEN + head * ROW_HEAD
    for first in range(0, PAGE_TOKENS, TOKENS):
        token = first + tl.arange(0, TOKENS)
        row = first_row + token * ROW_TOKEN
        step = load_steps(coded, layer, row, token < PAGE_TOKENS, STEPS, PEAKS)[:, None]
        codes = coded + CODES + (row.to(tl.int64) * DIM)[:, None] + dim
        at_values = values + (token * token_stride * PER_UNIT)[:, None] + dim
        inside = (token < PAGE_TOKENS)[:, None]
        if ENCODE:
            value = widen(tl.load(at_values, mask=inside & present, other=0))
            code = nearest(value * tl.div_rn(1.0, step))
            tl.store(codes, code.to(tl.int8), mask=inside & (dim < DIM))
        else:
            value = tl.load(codes, mask=inside & (dim < DIM), other=0).to(tl.float32) * step
            tl.store(at_values, narrow(value, WORD), mask=inside & present)
