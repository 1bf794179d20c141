"""Gather KV blocks out of an engine's paged cache and scatter them back.

A block is `block_tokens` tokens of all layers, in one contiguous payload; in the engine it lies in
``block_tokens / page_tokens`` pages per layer. One call moves any number of blocks of all layers: on an NVIDIA GPU in
one kernel launch, elsewhere by the plain torch code below, which is also what the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tierkv.kernels.page_move import PageMove, plan_gather, plan_scatter

__all__ = ["gather_blocks", "gather_reference", "scatter_blocks", "scatter_reference"]


def gather_blocks(caches: Sequence[Tensor], table: Tensor, payload: Tensor) -> None:
    """Copy pages of an engine's cache into block payloads.

    Reads every page named in `table` once per layer and writes the payload once: with payloads of P bytes and no null
    pages it moves 2 P bytes, and 8 bytes per page id and layer beside them.

    Parameters
    ----------
    caches
        One tensor per layer, all of the same shape, strides, dtype and device: ``[2, num_pages, page_tokens, heads,
        dim]`` or ``[num_pages, heads, page_tokens, 2 * dim]``. The last axis is contiguous.
    table
        Page ids ``[blocks, block_tokens / page_tokens]``, int32 or int64, on the CPU, where it is checked. A negative
        id is a null page: its tokens become zeros.
    payload
        ``[blocks, layers, 2, block_tokens, heads, dim]``, of the caches' dtype and on their device; each block
        contiguous. Overwritten.

    Raises
    ------
    ValueError
        Something does not fit; nothing has been written.

    Notes
    -----
    On a GPU the work is queued on the current stream and this returns at once: keep caches and payload alive and
    unchanged until the stream has passed it. On a CPU it blocks.
    """
    move = plan_gather(caches, table, payload)
    if payload.is_cuda:
        from tierkv.kernels.page_kernel import move_pages

        move_pages(move, gather=True)
    else:
        gather_reference(move)


def scatter_blocks(payload: Tensor, table: Tensor, caches: Sequence[Tensor]) -> None:
    """Copy block payloads into pages of an engine's cache: the inverse of `gather_blocks`, with the same parameters.

    Reads the payload once and writes every page named in `table` once per layer: 2 P bytes for payloads of P bytes.
    A negative id is a null page: its tokens are skipped. Pages not named in `table` keep their bytes.

    Raises
    ------
    ValueError
        Something does not fit, the table names a page twice, or caches overlap in memory; nothing has been written.
    """
    move = plan_scatter(payload, table, caches)
    if payload.is_cuda:
        from tierkv.kernels.page_kernel import move_pages

        move_pages(move, gather=False)
    else:
        scatter_reference(move)


def gather_reference(move: PageMove) -> None:
    """Gather in plain torch, layer by layer."""
    ids = move.table.flatten().to(move.payload.device)
    null = (ids < 0).nonzero().flatten()
    for layer, pages in enumerate(move.pages):
        runs = pages.index_select(1, ids.clamp(min=0)).index_fill_(1, null, 0)
        blocks = runs.view(2, len(move.payload), *move.payload.shape[3:])
        move.payload[:, layer] = blocks.transpose(0, 1)


def scatter_reference(move: PageMove) -> None:
    """Scatter in plain torch, layer by layer."""
    ids = move.table.flatten().to(move.payload.device)
    live = (ids >= 0).nonzero().flatten()
    for layer, pages in enumerate(move.pages):
        blocks = move.payload[:, layer].transpose(0, 1)
        runs = blocks.reshape(2, len(ids), *pages.shape[2:])
        pages.index_copy_(1, ids[live], runs.index_select(1, live))
