"""What a move between paged KV caches and block payloads is, checked before any byte moves.

Engines keep KV in pages, in one of two shapes per layer:

    NHD    [2, num_pages, page_tokens, heads, dim]
    HND    [num_pages, heads, page_tokens, 2 * dim]        K in the first half of the last axis, V in the second

Both become the same strided view `[2, num_pages, page_tokens, heads, dim]` here, so everything after this module
deals with one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from operator import attrgetter

import torch
from torch import Tensor

__all__ = ["PageMove", "plan_gather", "plan_scatter"]

# Bytes are moved, never numbers: a float copy may quieten a signalling NaN, an integer copy cannot.
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TRAITS = (attrgetter("shape"), Tensor.stride, attrgetter("dtype"), attrgetter("device"))


@dataclass(frozen=True, slots=True)
class PageMove:
    """A checked move. All tensors are views of the caller's memory.

    Attributes
    ----------
    pages
        Per layer an integer view ``[2, num_pages, page_tokens, heads, dim]``, any strides but the last, which is 1.
        Every layer has the same shape and strides.
    table
        Page ids, int64 ``[blocks, pages_per_block]`` on the CPU; negative for no page.
    payload
        Integer view ``[blocks, layers, 2, pages_per_block * page_tokens, heads, dim]``; each block is contiguous.
    """

    pages: tuple[Tensor, ...]
    table: Tensor
    payload: Tensor


def plan_gather(caches: Sequence[Tensor], table: Tensor, payload: Tensor) -> PageMove:
    """Check a gather. Raises `ValueError` naming what does not fit."""
    return _plan(caches, table, payload)


def plan_scatter(payload: Tensor, table: Tensor, caches: Sequence[Tensor]) -> PageMove:
    """Check a scatter: as `plan_gather`, and no two of its destinations may share a byte."""
    move = _plan(caches, table, payload)
    written = [page for page in move.table.flatten().tolist() if page >= 0]
    if len(set(written)) != len(written):
        raise ValueError("the block table names a page twice: two blocks would be written over each other")
    if not _disjoint(move.pages):
        raise ValueError("the caches overlap in memory: two layers, or two pages, would be written over each other")
    return move


def _plan(caches: Sequence[Tensor], table: Tensor, payload: Tensor) -> PageMove:
    if not caches:
        raise ValueError("there is no cache to move pages of")
    first = caches[0]
    for index, cache in enumerate(caches):
        if any(trait(cache) != trait(first) for trait in _TRAITS):
            raise ValueError(f"cache {index} differs from cache 0 in shape, strides, dtype or device")
    if first.element_size() not in _INTEGER_OF_SIZE:
        raise ValueError(f"elements of {first.dtype} cannot be moved")
    if (payload.dtype, payload.device) != (first.dtype, first.device):
        raise ValueError(
            f"the payload is {payload.dtype} on {payload.device}, the caches are {first.dtype} on {first.device}"
        )
    pages = tuple(_page_view(cache) for cache in caches)
    _check_payload(payload, len(caches), pages[0])
    move = PageMove(pages, _check_table(table, payload, pages[0]), _as_integers(payload))
    low, high = _extent(move.payload)
    for index, view in enumerate(pages):
        start, end = _extent(view)
        if payload.numel() and start < high and low < end:
            raise ValueError(f"the payload overlaps cache {index} in memory")
    return move


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def _page_view(cache: Tensor) -> Tensor:
    """Return a cache of either shape as integers ``[2, num_pages, page_tokens, heads, dim]``."""
    shape = tuple(cache.shape)
    if 0 in shape:
        raise ValueError(f"a cache of shape {shape} is empty")
    if cache.stride(-1) != 1:
        raise ValueError(f"the last axis of a cache must be contiguous, its stride is {cache.stride(-1)}")
    if cache.dim() == 5 and shape[0] == 2:
        return _as_integers(cache)
    if cache.dim() == 4 and shape[3] % 2 == 0:
        return _as_integers(cache).view(*shape[:3], 2, shape[3] // 2).permute(3, 0, 2, 1, 4)
    raise ValueError(
        f"a cache of shape {shape} is neither [2, num_pages, page_tokens, heads, dim] "
        "nor [num_pages, heads, page_tokens, 2 * dim]"
    )


def _check_payload(payload: Tensor, layers: int, view: Tensor) -> None:
    _, _, page_tokens, heads, dim = view.shape
    shape = tuple(payload.shape)
    if (
        len(shape) != 6
        or (*shape[1:3], *shape[4:]) != (layers, 2, heads, dim)
        or shape[3] == 0
        or shape[3] % page_tokens
    ):
        raise ValueError(
            f"the payload has shape {shape}, not [blocks, {layers}, 2, a multiple of {page_tokens}, {heads}, {dim}]"
        )
    if shape[0] and not payload[0].is_contiguous():
        raise ValueError("each block of the payload must be contiguous")
    if shape[0] > 1 and payload.stride(0) < payload[0].numel():
        raise ValueError("the blocks of the payload overlap in memory")


def _check_table(table: Tensor, payload: Tensor, view: Tensor) -> Tensor:
    if table.device.type != "cpu" or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"the block table must be int32 or int64 on the CPU, not {table.dtype} on {table.device}")
    expected = (payload.shape[0], payload.shape[3] // view.shape[2])
    if tuple(table.shape) != expected:
        raise ValueError(f"the block table has shape {tuple(table.shape)}, not {expected}")
    if table.numel() and int(table.max()) >= view.shape[1]:
        raise ValueError(f"the block table names page {int(table.max())} of a cache of {view.shape[1]} pages")
    return table.to(torch.int64)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one after its last."""
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _disjoint(views: Sequence[Tensor]) -> bool:
    """Say whether all elements of equally strided views certainly have addresses of their own."""
    view = views[0]
    size = view.element_size()
    axes = [(stride * size, count) for stride, count in zip(view.stride(), view.shape, strict=True)]
    addresses = sorted(v.data_ptr() for v in views)
    gaps = [after - before for before, after in pairwise(addresses)]
    start, end = _extent(view)
    if gaps and min(gaps) < end - start:
        # Layers interleaved in one allocation: look at them as one more axis of it.
        step = gcd(*gaps)
        if step == 0:
            return False
        axes.append((step, (addresses[-1] - addresses[0]) // step + 1))
    reach = size
    for stride, count in sorted(axes):
        if count > 1:
            if stride < reach:
                return False
            reach += stride * (count - 1)
    return True
