"""What a move between paged KV caches and block payloads is, checked before any byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from tierkv.kernels.paged_caches import PagedCaches, PayloadOrder, as_integers, extent, overlaps

__all__ = [
    "PageMove",
    "check_apart",
    "check_blocks",
    "check_order",
    "check_table",
    "check_written_pages",
    "plan_gather",
    "plan_scatter",
]


@dataclass(frozen=True, slots=True)
class PageMove:
    """A checked move. All tensors are views of the caller's memory.

    Attributes
    ----------
    caches
        The engine's side.
    table
        Page ids, int64 ``[blocks, pages_per_block]`` on the CPU; negative for no page.
    payloads
        Per block an integer view ``[layers, planes, tokens, heads, dim]``; in memory it is contiguous in `order`.
    order
        Of the payloads.
    """

    caches: PagedCaches
    table: Tensor
    payloads: tuple[Tensor, ...]
    order: PayloadOrder


def plan_gather(
    caches: PagedCaches, table: Tensor, payloads: Tensor | Sequence[Tensor], order: PayloadOrder
) -> PageMove:
    """Check a gather. Raises `ValueError` naming what does not fit."""
    move = _plan(caches, table, payloads, order)
    check_apart(move.payloads)
    return move


def plan_scatter(
    payloads: Tensor | Sequence[Tensor], table: Tensor, caches: PagedCaches, order: PayloadOrder
) -> PageMove:
    """Check a scatter. Raises `ValueError` naming what does not fit."""
    move = _plan(caches, table, payloads, order)
    check_written_pages(caches, move.table)
    return move


def _plan(caches: PagedCaches, table: Tensor, payloads: Tensor | Sequence[Tensor], order: PayloadOrder) -> PageMove:
    check_order(order)
    table = check_table(caches, table)
    shape = caches.payload_shape(table.shape[1] * caches.page_tokens, order)
    views = map(as_integers, check_blocks(caches, payloads, len(table), shape, caches.dtype))
    return PageMove(caches, table, tuple(views if order == "NHD" else (view.transpose(2, 3) for view in views)), order)


def check_order(order: PayloadOrder) -> None:
    """Raise `ValueError` for an unknown order."""
    if order not in get_args(PayloadOrder):
        raise ValueError(f"unknown payload order {order!r}, use NHD or HND")


def check_blocks(
    caches: PagedCaches, payloads: Tensor | Sequence[Tensor], count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return what is moved from or to the caches as one contiguous tensor of `shape` and `dtype` per block.

    `payloads` is one tensor ``[count, *shape]`` or `count` tensors. Raises `ValueError` when they do not fit, cannot be
    reached from the device of the caches, or overlap them.
    """
    blocks = _blocks(payloads, count, shape)
    for index, block in enumerate(blocks):
        if tuple(block.shape) != shape:
            raise ValueError(f"the payload of block {index} has shape {tuple(block.shape)}, not {shape}")
        if block.dtype != dtype or not _reachable(block, caches.device):
            raise ValueError(
                f"the payload is {block.dtype} on {block.device}, not {dtype} for caches on {caches.device}"
            )
        if not block.is_contiguous():
            raise ValueError(f"the payload of block {index} is not contiguous")
    if overlaps(list(map(extent, blocks)), caches.extents):
        raise ValueError("the payload overlaps a cache in memory")
    return blocks


def check_apart(blocks: Sequence[Tensor]) -> None:
    """Raise `ValueError` if two blocks that are to be written share a byte."""
    if any(start < end for (_, end), (start, _) in pairwise(sorted(map(extent, blocks)))):
        raise ValueError("the blocks of the payload overlap in memory")


def _blocks(payloads: Tensor | Sequence[Tensor], count: int, shape: tuple[int, ...]) -> Sequence[Tensor]:
    if isinstance(payloads, Tensor):
        if payloads.dim() != 1 + len(shape) or len(payloads) != count:
            raise ValueError(f"the payload has shape {tuple(payloads.shape)}, not {(count, *shape)}")
        return payloads.unbind(0)
    if len(payloads) != count:
        raise ValueError(f"there are payloads of {len(payloads)} blocks, and the block table has {count}")
    return payloads


def _reachable(payload: Tensor, device: torch.device) -> bool:
    """Say whether kernels on `device` can use the payload's address. Pinned memory has the same one on every GPU."""
    return payload.device == device or (device.type == "cuda" and payload.device.type == "cpu" and payload.is_pinned())


def check_table(caches: PagedCaches, table: Tensor) -> Tensor:
    """Return a block table as int64. Raises `ValueError` if it does not fit the caches."""
    if table.device.type != "cpu" or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"the block table must be int32 or int64 on the CPU, not {table.dtype} on {table.device}")
    if table.dim() != 2 or table.shape[1] == 0:
        raise ValueError(f"the block table has shape {tuple(table.shape)}, not [blocks, pages per block]")
    if table.numel() and int(table.max()) >= caches.num_pages:
        raise ValueError(f"the block table names page {int(table.max())} of a cache of {caches.num_pages} pages")
    return table.to(torch.int64)


def check_written_pages(caches: PagedCaches, table: Tensor) -> None:
    """Raise `ValueError` if two of a scatter's destinations may share a byte."""
    written = [page for page in table.flatten().tolist() if page >= 0]
    if len(set(written)) != len(written):
        raise ValueError("the block table names a page twice: two blocks would be written over each other")
    if not caches.disjoint:
        raise ValueError("the caches overlap in memory: two layers, or two pages, would be written over each other")
