"""The Triton kernels behind `tierkv.kernels.checksum`: lane sums of all blocks in parallel, then a fold per payload."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tierkv.kernels import checksum

__all__ = ["sum_payloads"]

_WIDEST_UNIT = 16
_BLOCKS_PER_PROGRAM = 8
_PAYLOADS_PER_PROGRAM = 8
_AHEAD = 16  # steps of some 20 cycles each: what a load from the L2 cache takes, and more

_PRIME32_1 = tl.constexpr(checksum.PRIME32_1)
_AVALANCHE = tl.constexpr(checksum.AVALANCHE)
_STRIPES = tl.constexpr(checksum.BLOCK_BYTES // checksum.STRIPE_BYTES)
# rows of eight words of the table of constants, after the keys of the stripes
_SCRAMBLE_ROW = tl.constexpr(16)
_LAST_ROW = tl.constexpr(17)
_MERGE_ROW = tl.constexpr(18)
_START_ROW = tl.constexpr(19)


@triton.jit
def load_words(address: tl.tensor, index: tl.tensor, live: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Load 64-bit words `index` of memory that is aligned to UNIT bytes; 0 where not live."""
    if UNIT >= 8:
        words = address.to(tl.pointer_type(tl.uint64))
        if UNIT == 16:
            words = tl.multiple_of(words, 16)
        return tl.load(words + index, mask=live, other=0)
    PIECE: tl.constexpr = tl.uint8 if UNIT == 1 else (tl.uint16 if UNIT == 2 else tl.uint32)
    pieces = address.to(tl.pointer_type(PIECE)) + index * (8 // UNIT)
    word = tl.load(pieces, mask=live, other=0).to(tl.uint64)
    for nth in tl.static_range(1, 8 // UNIT):
        word |= tl.load(pieces + nth, mask=live, other=0).to(tl.uint64) << (8 * UNIT * nth)
    return word


@triton.jit
def product_of_halves(word: tl.tensor) -> tl.tensor:
    return word.to(tl.uint32).to(tl.uint64) * (word >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit(do_not_specialize=["tiles", "rows", "blocks", "stripes"])
def lane_sums_kernel(
    addresses: tl.tensor,
    constants: tl.tensor,
    sums: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    stripes: tl.tensor,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Sum what the stripes of each block add to the lanes.

    Grid: (payloads * tiles of BLOCKS blocks,). `blocks` counts the last one, which has no, some or all of its stripes;
    `stripes` are those of a whole payload. `sums` is ``[payloads, rows, 8]``, its first `blocks` rows are written.
    """
    payload = tl.program_id(0) // tiles
    block = tl.program_id(0) % tiles * BLOCKS + tl.arange(0, BLOCKS)
    stripe = tl.arange(0, _STRIPES)
    pair = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    in_block = stripe[:, None, None] * 8 + pair
    even_keys, odd_keys = tl.split(tl.load(constants + in_block).to(tl.uint64))

    in_payload = block[:, None] * _STRIPES + stripe[None, :]
    live = in_payload < stripes
    word = block[:, None, None, None].to(tl.int64) * (8 * _STRIPES) + in_block[None]
    even, odd = tl.split(load_words(tl.load(addresses + payload), word, live[:, :, None, None], UNIT))
    # each lane takes the product of its own halves, keyed, and its neighbour as it is
    to_even = tl.where(live[:, :, None], product_of_halves(even ^ even_keys[None]) + odd, 0)
    to_odd = tl.where(live[:, :, None], product_of_halves(odd ^ odd_keys[None]) + even, 0)
    lanes = tl.join(tl.sum(to_even, 1), tl.sum(to_odd, 1))
    target = sums + (payload.to(tl.int64) * rows + block[:, None, None]) * 8 + pair
    tl.store(target, lanes.to(tl.int64), mask=block[:, None, None] < blocks)


@triton.jit
def load_ahead(sums: tl.tensor, first: tl.tensor, live: tl.tensor, AHEAD: tl.constexpr) -> tl.tuple:
    """Load the lane sums of AHEAD blocks, as many tensors."""
    loaded = ()
    for nth in tl.static_range(AHEAD):
        loaded = loaded + (tl.load(sums + (first + nth) * 8, mask=live, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def scramble(acc: tl.tensor, keys: tl.tensor) -> tl.tensor:
    return (acc ^ (acc >> 47) ^ keys) * _PRIME32_1


@triton.jit(do_not_specialize=["payloads", "last_stripe", "length_term"])
def fold_kernel(
    addresses: tl.tensor,
    constants: tl.tensor,
    sums: tl.tensor,
    results: tl.tensor,
    payloads: tl.tensor,
    last_stripe: tl.tensor,
    length_term: tl.tensor,
    SCRAMBLED: tl.constexpr,
    AHEAD: tl.constexpr,
    UNIT: tl.constexpr,
    PAYLOADS: tl.constexpr,
) -> None:
    """Fold the lane sums of each payload into its checksum.

    Grid: (tiles of PAYLOADS payloads,). `sums` is ``[payloads, rows, 8]``: a row for each of the SCRAMBLED blocks and
    for the last one, rounded up to whole groups of AHEAD. `last_stripe` is the byte offset of the last 64 bytes of a
    payload, UNIT what their address is a multiple of. Compiled once per length, so the loop has no conditions.
    """
    payload = (tl.program_id(0) * PAYLOADS + tl.arange(0, PAYLOADS)).to(tl.int64)
    live = (payload < payloads)[:, None, None]
    pair = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    keys = tl.load(constants + _SCRAMBLE_ROW * 8 + pair).to(tl.uint64)
    lanes = sums + payload[:, None, None] * ((SCRAMBLED // AHEAD + 1) * AHEAD * 8) + pair
    acc = tl.load(constants + _START_ROW * 8 + pair).to(tl.uint64)
    acc = tl.broadcast_to(acc, (PAYLOADS, 4, 2))

    current = load_ahead(lanes, 0, live, AHEAD)
    for first in range(AHEAD, SCRAMBLED // AHEAD * AHEAD + 1, AHEAD):
        following = load_ahead(lanes, first, live, AHEAD)
        for nth in tl.static_range(AHEAD):
            acc = scramble(acc + current[nth].to(tl.uint64), keys)
        current = following
    for nth in tl.static_range(SCRAMBLED % AHEAD):
        acc = scramble(acc + current[nth].to(tl.uint64), keys)
    acc += current[SCRAMBLED % AHEAD].to(tl.uint64)

    address = tl.load(addresses + payload, mask=payload < payloads, other=0) + last_stripe
    words = load_words(address[:, None, None], pair, live, UNIT)
    even, odd = tl.split(words)
    to_even, to_odd = tl.split(product_of_halves(words ^ tl.load(constants + _LAST_ROW * 8 + pair).to(tl.uint64)))
    acc += tl.join(to_even + odd, to_odd + even)

    even, odd = tl.split(acc ^ tl.load(constants + _MERGE_ROW * 8 + pair).to(tl.uint64))
    result = tl.sum((even * odd) ^ tl.umulhi(even, odd), 1) + length_term.to(tl.uint64)
    result = (result ^ (result >> 37)) * _AVALANCHE
    result ^= result >> 32
    tl.store(results + payload, result.to(tl.int64), mask=payload < payloads)


@cache
def _constants(device: torch.device) -> Tensor:
    rows = [*checksum.STRIPE_KEYS, checksum.SCRAMBLE_KEYS, checksum.LAST_KEYS, checksum.MERGE_KEYS, checksum.START]
    return torch.tensor(rows, device=device)


def sum_payloads(payloads: Sequence[Tensor]) -> Tensor:
    """Queue the checksums of checked payloads on the current stream of their device; return them, int64 ``[n]``."""
    device, length = payloads[0].device, payloads[0].nbytes
    blocks, stripes, last_stripe = checksum.split(length)
    pointers = [payload.data_ptr() for payload in payloads]
    addresses = torch.tensor(pointers)
    if device.type == "cuda":
        # From pageable memory the copy would wait for all that the stream has queued before.
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    count = len(payloads)
    tiles = triton.cdiv(blocks + 1, _BLOCKS_PER_PROGRAM)
    rows = (blocks // _AHEAD + 1) * _AHEAD
    sums = torch.empty(count, rows, 8, dtype=torch.int64, device=device)
    results = torch.empty(count, dtype=torch.int64, device=device)
    constants = _constants(device)
    unit = gcd(_WIDEST_UNIT, *pointers)
    with torch.cuda.device_of(results):  # type: ignore[no-untyped-call]
        lane_sums_kernel[(count * tiles,)](
            addresses,
            constants,
            sums,
            tiles,
            rows,
            blocks + 1,
            blocks * (checksum.BLOCK_BYTES // checksum.STRIPE_BYTES) + stripes,
            UNIT=unit,
            BLOCKS=_BLOCKS_PER_PROGRAM,
        )
        fold_kernel[(triton.cdiv(count, _PAYLOADS_PER_PROGRAM),)](
            addresses,
            constants,
            sums,
            results,
            count,
            last_stripe,
            checksum.length_term(length),
            SCRAMBLED=blocks,
            AHEAD=_AHEAD,
            UNIT=gcd(8, unit, last_stripe),
            PAYLOADS=_PAYLOADS_PER_PROGRAM,
            num_warps=1,
        )
    return results
