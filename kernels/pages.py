"""Gather KV blocks out of an engine's paged caches and scatter them back.

A block is `block_tokens` tokens of all layers of a KV group, in one contiguous payload; in the engine it lies in
``block_tokens / page_tokens`` pages per layer. One call moves any number of blocks of all layers: on an NVIDIA GPU in
one kernel launch, elsewhere by the plain torch code below, which is also what the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from tierkv.kernels.page_move import PageMove, plan_gather, plan_scatter
from tierkv.kernels.paged_caches import PagedCaches, PayloadOrder

__all__ = ["gather_blocks", "gather_reference", "scatter_blocks", "scatter_reference"]


def gather_blocks(
    caches: PagedCaches, table: Tensor, payloads: Tensor | Sequence[Tensor], *, order: PayloadOrder
) -> None:
    """Copy pages of an engine's caches into block payloads.

    Reads every page named in `table` once per layer and writes the payloads once: with payloads of P bytes and no null
    pages it moves 2 P bytes, and 8 bytes per page id, block and layer beside them.

    Parameters
    ----------
    caches
        The engine's caches.
    table
        Page ids ``[blocks, block_tokens / page_tokens]``, int32 or int64, on the CPU, where it is checked. A negative
        id is a null page: its tokens become zeros.
    payloads
        One tensor ``[blocks, layers, planes, block_tokens, heads, dim]``, or with `order` HND ``[blocks, layers,
        planes, heads, block_tokens, dim]``, of which each block is contiguous; or one contiguous tensor per block, that
        shape without its first axis, lying anywhere. Of the caches' dtype, and on their device or, for caches on a
        GPU, in pinned memory. Overwritten.
    order
        Order of the payloads, independent of the caches' layout.

    Raises
    ------
    ValueError
        Something does not fit; nothing has been written.

    Notes
    -----
    On a GPU the work is queued on the current stream and this returns at once: keep caches and payloads alive and
    unchanged until the stream has passed it. On a CPU it blocks.
    """
    move = plan_gather(caches, table, payloads, order)
    if caches.device.type == "cuda":
        from tierkv.kernels.page_kernel import move_pages

        move_pages(move, gather=True)
    else:
        gather_reference(move)


def scatter_blocks(
    payloads: Tensor | Sequence[Tensor], table: Tensor, caches: PagedCaches, *, order: PayloadOrder
) -> None:
    """Copy block payloads into pages of an engine's caches: the inverse of `gather_blocks`, with the same parameters.

    Reads the payloads once and writes every page named in `table` once per layer: 2 P bytes for payloads of P bytes.
    A negative id is a null page: its tokens are skipped, their bytes of the payload not read. So a part of a block can
    be moved, for example when an engine has its first pages already. Pages not named in `table` keep their bytes.

    Raises
    ------
    ValueError
        Something does not fit, the table names a page twice, or caches overlap in memory; nothing has been written.
    """
    move = plan_scatter(payloads, table, caches, order)
    if caches.device.type == "cuda":
        from tierkv.kernels.page_kernel import move_pages

        move_pages(move, gather=False)
    else:
        scatter_reference(move)


def gather_reference(move: PageMove) -> None:
    """Gather in plain torch: one copy per layer and run of pages that follow each other."""
    for page, slots, pages in _runs(move):
        if page < 0:
            slots.zero_()
        else:
            slots.copy_(pages)


def scatter_reference(move: PageMove) -> None:
    """Scatter in plain torch: one copy per layer and run of pages that follow each other; NHD: of each of K and V.

    Where a cache has each token's K beside its V, a copy of both would go back and forth between them in the payload.
    """
    for page, slots, pages in _runs(move):
        if page >= 0 and move.order == "NHD":
            for target, source in zip(pages.unbind(1), slots.unbind(1), strict=True):
                target.copy_(source)
        elif page >= 0:
            pages.copy_(slots)


def _runs(move: PageMove) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first page id, its place in the payload, its place in the cache) per layer and run of pages.

    A null page is a run of its own, and has no place in the cache. No index_select: its temporaries would cost as
    much again as the copy.
    """
    caches = [pages.transpose(0, 1) for pages in move.caches.pages]
    for ids, payload in zip(move.table.tolist(), move.payloads, strict=True):
        slots = payload.view(*payload.shape[:2], len(ids), -1, *payload.shape[3:]).transpose(1, 2)
        for start, stop in _consecutive(ids):
            page = ids[start]
            for layer, cache in zip(slots[:, start:stop].unbind(0), caches, strict=True):
                yield page, layer, cache[page : page + stop - start]


def _consecutive(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[start] < 0 or ids[at] != ids[at - 1] + 1:
            yield start, at
            start = at
