"""Byte planes of KV blocks: codec ``bx1`` without its Huffman coding, done where the KV is.

On the way to a GPU the CPU then only expands Huffman-coded planes, the planes travel, and merging them writes straight
into the engine's pages; on the way back pages are split into planes, and the CPU only codes. The planes are those of
docs/container.md, bit for bit, in one buffer per block:

    dtype               planes, in order, each from a multiple of 16 bytes; n values, c channels
    float32             low (2n bytes), rest (n), peaks (c), residuals (n)
    bfloat16, float16                   rest (n), peaks (c), residuals (n)
    float8                                        peaks (c), residuals (n)

A channel is one (layer, plane, head, dim); `peaks` holds the largest exponent code in it, `residuals` each value's
distance from that. On an NVIDIA GPU one call is one kernel launch, elsewhere the plain torch code below runs, which is
also what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierkv.kernels.page_move import PageMove
from tierkv.kernels.paged_caches import PagedCaches, PayloadOrder, as_integers
from tierkv.kernels.pages import gather_reference, scatter_reference
from tierkv.kernels.plane_move import PlaneMove, PlaneSizes, plan_merge, plan_split

__all__ = [
    "gather_planes",
    "merge_planes",
    "merge_reference",
    "planes_nbytes",
    "scatter_planes",
    "split_planes",
    "split_reference",
]


def planes_nbytes(shape: tuple[int, ...], dtype: torch.dtype, order: PayloadOrder) -> int:
    """Return the bytes that the planes of one block take; `shape` is its payload's. Raises `ValueError`."""
    return PlaneSizes.of(shape, dtype, order).nbytes


def gather_planes(
    caches: PagedCaches, table: Tensor, buffers: Tensor | Sequence[Tensor], *, order: PayloadOrder
) -> None:
    """Split blocks whose KV lies in pages: `gather_blocks` and `split_planes` in one.

    Of payloads of P bytes it reads 2 P, for the peaks and then for the planes, the second time from the L2 cache, and
    writes P and the peaks, one byte per channel.

    Parameters
    ----------
    caches
        The engine's caches, of bfloat16, float16, float32 or float8.
    table
        Page ids ``[blocks, block_tokens / page_tokens]``, int32 or int64, on the CPU. The tokens of a negative id count
        as zeros.
    buffers
        uint8 ``[blocks, planes_nbytes]``, of which each block is contiguous, or one contiguous tensor per block, lying
        anywhere; on the caches' device or, for caches on a GPU, in pinned memory. Overwritten but for the bytes between
        planes.
    order
        Order of the payload that the planes stand for, independent of the caches' layout.

    Raises
    ------
    ValueError
        Something does not fit; nothing has been written.

    Notes
    -----
    On a GPU the work is queued on the current stream and this returns at once: keep caches and buffers alive and
    unchanged until the stream has passed it. On a CPU it blocks, and goes through a copy of the blocks.
    """
    move = plan_split(caches, table, buffers, order)
    if caches.device.type == "cuda":
        from tierkv.kernels.plane_kernel import split_from_pages

        split_from_pages(move)
    else:
        split_reference(move)


def scatter_planes(
    buffers: Tensor | Sequence[Tensor], table: Tensor, caches: PagedCaches, *, order: PayloadOrder
) -> None:
    """Merge planes straight into pages: the inverse of `gather_planes`, with the same parameters.

    Reads the planes once, for payloads of P bytes P and the peaks, and writes P bytes. Tokens of negative page ids are
    skipped, and pages not named in `table` keep their bytes. Any planes can be merged; whether the right values come
    out is for the payload's checksum to say.

    Raises
    ------
    ValueError
        Something does not fit, the table names a page twice, or caches overlap in memory; nothing has been written.
    """
    move = plan_merge(buffers, table, caches, order)
    if caches.device.type == "cuda":
        from tierkv.kernels.plane_kernel import merge_into_pages

        merge_into_pages(move)
    else:
        merge_reference(move)


def split_planes(payloads: Tensor, buffers: Tensor | Sequence[Tensor], *, order: PayloadOrder) -> None:
    """Split payloads ``[blocks, layers, planes, ...]`` into byte planes. Else, bytes moved too, as `gather_planes`."""
    if len(payloads):
        gather_planes(PagedCaches.of_blocks(payloads, order), _every_block(payloads), buffers, order=order)


def merge_planes(buffers: Tensor | Sequence[Tensor], payloads: Tensor, *, order: PayloadOrder) -> None:
    """Merge byte planes into payloads ``[blocks, layers, planes, ...]``. Else, bytes moved too, as `scatter_planes`."""
    if len(payloads):
        scatter_planes(buffers, _every_block(payloads), PagedCaches.of_blocks(payloads, order), order=order)


def _every_block(payloads: Tensor) -> Tensor:
    return torch.arange(len(payloads))[:, None]


def split_reference(move: PlaneMove) -> None:
    """Split in plain torch, block by block, through a copy of the block."""
    for payload, ids, buffer in zip(_scratch(move), move.table, move.buffers, strict=True):
        gather_reference(PageMove(move.caches, ids[None], (_canonical(payload, move.order),), move.order))
        _split(payload, _views(move, buffer), axis=2 if move.order == "NHD" else 3)


def merge_reference(move: PlaneMove) -> None:
    """Merge in plain torch, block by block, through a copy of the block."""
    for payload, ids, buffer in zip(_scratch(move), move.table, move.buffers, strict=True):
        payload.copy_(_merged(_views(move, buffer), payload.dtype))
        scatter_reference(PageMove(move.caches, ids[None], (_canonical(payload, move.order),), move.order))


def _scratch(move: PlaneMove) -> list[Tensor]:
    """Return memory for one payload, as integers, as often as there are blocks."""
    shape, dtype = move.payload_shape, move.caches.dtype
    return [as_integers(torch.empty(shape, dtype=dtype, device=move.caches.device))] * len(move.buffers)


def _canonical(payload: Tensor, order: PayloadOrder) -> Tensor:
    return payload if order == "NHD" else payload.transpose(2, 3)


def _views(move: PlaneMove, buffer: Tensor) -> dict[str, Tensor]:
    """Return the planes in a buffer, shaped like their payload; `low` as int16, the others as uint8."""
    shape = move.payload_shape
    token_axis = 2 if move.order == "NHD" else 3
    found = {}
    for name, size, offset in zip(move.sizes.names, move.sizes.sizes, move.sizes.offsets, strict=True):
        plane = buffer[offset : offset + size]
        channels = (*shape[:token_axis], 1, *shape[token_axis + 1 :])
        found[name] = plane.view(channels if name == "peaks" else (*shape, 2) if name == "low" else shape)
    return found


def _split(payload: Tensor, planes: dict[str, Tensor], axis: int) -> None:
    """Fill `planes` from a payload of integers."""
    if payload.dtype == torch.uint8:
        codes = payload & 0x7F
        subtracted = payload
    else:
        halves = payload.to(torch.int32)
        if payload.dtype == torch.int32:
            planes["low"].copy_(payload.unsqueeze(-1).view(torch.uint8)[..., :2])
            halves = halves >> 16
        planes["rest"].copy_((halves >> 8 & 0x80 | halves & 0x7F).to(torch.uint8))
        codes = subtracted = (halves >> 7 & 0xFF).to(torch.uint8)
    peaks = codes.amax(axis, keepdim=True)
    planes["peaks"].copy_(peaks)
    # Modulo 256: of a float8 the sign comes out as the residual's top bit.
    planes["residuals"].copy_(peaks - subtracted)


def _merged(planes: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the payload, as integers of `dtype`."""
    codes = planes["peaks"] - planes["residuals"]
    if dtype == torch.uint8:
        return codes
    rest = planes["rest"].to(torch.int32)
    halves = (rest & 0x80) << 8 | codes.to(torch.int32) << 7 | rest & 0x7F
    if dtype == torch.int16:
        return halves.to(torch.int16)
    low = planes["low"].to(torch.int32)
    return halves << 16 | low[..., 1] << 8 | low[..., 0]
