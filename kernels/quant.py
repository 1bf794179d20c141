"""Quantise KV blocks to a byte per value, and restore them, straight from and to an engine's pages.

For a transfer or a tier that keeps blocks in half the space of bfloat16 or less, and for the lossy codecs, whose CPU
part is then Huffman coding only. What a scheme's sections mean is in `tierkv.kernels.coding`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.kernels import quant_reference as reference
from tierkv.kernels.coding import ALIGNMENT, BlockShape, Scheme
from tierkv.kernels.page_move import check_table, check_written_pages
from tierkv.kernels.paged_caches import PagedCaches, extent, overlaps

__all__ = ["dequantize_blocks", "dequantize_pages", "quantize_blocks", "quantize_pages"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_pages(caches: PagedCaches, table: Tensor, scheme: Scheme, coded: Tensor) -> Tensor:
    """Code blocks whose K and V lie in pages.

    Of payloads of P bytes, n values, `Uniform` reads 2 P (statistics, then codes; the second time from the L2 cache if
    it holds them) and `Float8` P. Both write n bytes of codes, and scales: `Uniform` 3 bytes per channel of K and 1 per
    token and head of V, `Float8` 4 per head.

    Parameters
    ----------
    caches
        The engine's caches, of bfloat16, float16 or float32.
    table
        Page ids ``[blocks, block_tokens / page_tokens]``, int32 or int64, on the CPU. The tokens of a negative id are
        coded as zeros.
    scheme
        How to code; its shape is that of the blocks.
    coded
        uint8 ``[blocks, nbytes]`` on the caches' device, each block contiguous and aligned to 16 bytes. Overwritten.

    Returns
    -------
    Tensor
        bool ``[blocks]`` on the caches' device: whether a block could be coded. False for blocks that hold a NaN, an
        infinity or a magnitude above 2**40 (float16: 2**15); their codes mean nothing.

    Raises
    ------
    ValueError
        Something does not fit; nothing has been written.

    Notes
    -----
    On a GPU the work is queued on the current stream and this returns at once: keep caches and codes alive and
    unchanged until the stream has passed it. On a CPU it blocks, and goes through a copy of the blocks.

    Codes, steps and centers of K are the host codec's, bit for bit, but for blocks with a single channel. Steps of V
    can differ in their last bit where the root mean square, whose order of summation nobody promises, lies within a
    rounding error of the border between two; `fineness` 0 does not ask for it, so then V is the same too.
    """
    table = _check(caches, table, scheme, coded)
    if not len(table):
        return torch.empty(0, dtype=torch.bool, device=caches.device)
    if caches.device.type == "cuda":
        from tierkv.kernels import quant_launch

        return quant_launch.encode(caches, table, scheme, coded)
    return reference.encode(reference.gathered(caches, table, scheme.shape), scheme, coded)


def dequantize_pages(coded: Tensor, scheme: Scheme, table: Tensor, caches: PagedCaches) -> None:
    """Restore coded blocks into pages: the inverse of `quantize_pages` but for its loss, with the same parameters.

    Reads the n bytes of codes of n values, and scales, once; writes P bytes of payload. Tokens of negative page ids are
    skipped, and pages not named in `table` keep their bytes.

    Values are exactly those that the host codec restores. Steps that no quantiser chooses give wrong values, and are
    not told apart here: what was damaged on the way is found by the checksum of the payload.

    Raises
    ------
    ValueError
        Something does not fit, the table names a page twice, or caches overlap in memory; nothing has been written.
    """
    table = _check(caches, table, scheme, coded)
    check_written_pages(caches, table)
    if not len(table):
        return
    if caches.device.type == "cuda":
        from tierkv.kernels import quant_launch

        quant_launch.decode(coded, scheme, table, caches)
    else:
        reference.scattered(reference.decode(coded, scheme, caches.dtype), caches, table, scheme.shape)


def quantize_blocks(payloads: Tensor, scheme: Scheme, coded: Tensor) -> Tensor:
    """As `quantize_pages`, for payloads ``[blocks, *scheme.shape.payload]``."""
    if not len(payloads):
        return torch.empty(0, dtype=torch.bool, device=payloads.device)
    return quantize_pages(_as_pages(payloads, scheme.shape), _every_page(payloads), scheme, coded)


def dequantize_blocks(coded: Tensor, scheme: Scheme, payloads: Tensor) -> None:
    """As `dequantize_pages`, for payloads ``[blocks, *scheme.shape.payload]``."""
    if len(payloads):
        dequantize_pages(coded, scheme, _every_page(payloads), _as_pages(payloads, scheme.shape))


def _as_pages(payloads: Tensor, shape: BlockShape) -> PagedCaches:
    return PagedCaches.of_blocks(payloads, shape.order)


def _every_page(payloads: Tensor) -> Tensor:
    return torch.arange(len(payloads))[:, None]


def _check(caches: PagedCaches, table: Tensor, scheme: Scheme, coded: Tensor) -> Tensor:
    table = check_table(caches, table)
    shape = scheme.shape
    if caches.dtype not in _DTYPES:
        raise ValueError(f"values of {caches.dtype} are not quantised: use bfloat16, float16 or float32")
    if any(pages.data_ptr() % pages.element_size() for pages in caches.pages):
        raise ValueError(f"the caches are not aligned to their elements of {caches.dtype}")
    held = caches.payload_shape(table.shape[1] * caches.page_tokens, shape.order)
    if held != shape.payload:
        raise ValueError(f"{table.shape[1]} pages of the caches hold {held}, the scheme is for {shape.payload}")
    if coded.dtype != torch.uint8 or coded.device != caches.device or tuple(coded.shape) != (len(table), scheme.nbytes):
        raise ValueError(
            f"coded blocks are {coded.dtype} {tuple(coded.shape)} on {coded.device}, not torch.uint8 "
            f"{(len(table), scheme.nbytes)} on {caches.device}"
        )
    if coded.stride(1) != 1 or (len(coded) > 1 and coded.stride(0) < scheme.nbytes):
        raise ValueError("each coded block must be contiguous, and they may not overlap")
    if coded.data_ptr() % ALIGNMENT or (len(coded) > 1 and coded.stride(0) % ALIGNMENT):
        raise ValueError(f"coded blocks must be aligned to {ALIGNMENT} bytes")
    if len(coded) and overlaps([extent(coded)], caches.extents):
        raise ValueError("coded blocks overlap a cache in memory")
    return table
