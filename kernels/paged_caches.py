"""An engine's paged KV caches, one per layer, seen in one way whatever the engine's layout is.

Axes: 2 is K and V, P pages, N tokens of a page, H heads, D values of a head.

    2PNHD   [2, pages, page_tokens, heads, dim]
    P2NHD   [pages, 2, page_tokens, heads, dim]
    PHN2D   [pages, heads, page_tokens, 2 * dim]       K in the first half of the last axis, V in the second
    PND     [pages, page_tokens, latent]               MLA: one latent vector per token, neither K nor V

A layout says what the axes are, not how they lie in memory: a cache that lies [2, pages, heads, page_tokens, dim] is
2PNHD after ``transpose(2, 3)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from operator import attrgetter
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["CacheLayout", "PagedCaches", "PayloadOrder", "as_integers", "extent", "overlaps"]

CacheLayout = Literal["2PNHD", "P2NHD", "PHN2D", "PND"]
"""What the axes of a cache are, see the module."""

PayloadOrder = Literal["NHD", "HND"]
"""Whether a block's payload is ``[layers, planes, tokens, heads, dim]`` or ``[layers, planes, heads, tokens, dim]``."""

# Bytes are moved, never numbers: a float copy may quieten a signalling NaN, an integer copy cannot.
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_AXES: dict[CacheLayout, int] = {"2PNHD": 5, "P2NHD": 5, "PHN2D": 4, "PND": 3}
_TRAITS = (attrgetter("shape"), Tensor.stride, attrgetter("dtype"), attrgetter("device"))


@dataclass(frozen=True, slots=True)
class PagedCaches:
    """The caches of layers that share a layout and a block table: one KV group. Make one with `of` and keep it.

    Attributes
    ----------
    pages
        Per layer an integer view ``[planes, num_pages, page_tokens, heads, dim]`` of the engine's memory; 2 planes, K
        and V, or for MLA 1. All have the same shape and strides; the last stride is 1.
    dtype
        Of the engine's tensors.
    disjoint
        Whether no two elements share a byte, so that pages can be written.
    extents
        Addresses ``(first byte, one after the last)`` of the memory in which the caches lie, ascending, joined where
        they touch.
    """

    pages: tuple[Tensor, ...]
    dtype: torch.dtype
    disjoint: bool
    extents: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, caches: Sequence[Tensor], layout: CacheLayout) -> PagedCaches:
        """Check caches against their layout.

        Parameters
        ----------
        caches
            One tensor per layer, all of the same shape, strides, dtype and device. Any strides, but the last axis is
            contiguous. Kept, never copied.
        layout
            What their axes are.

        Raises
        ------
        ValueError
            Something does not fit.
        """
        if not caches:
            raise ValueError("there is no cache to move pages of")
        if layout not in get_args(CacheLayout):
            raise ValueError(f"unknown cache layout {layout!r}, use one of {', '.join(get_args(CacheLayout))}")
        return cls._of(caches, lambda cache: _canonical(cache, layout))

    @classmethod
    def of_blocks(cls, payload: Tensor, order: PayloadOrder) -> PagedCaches:
        """See payloads ``[blocks, layers, planes, ...]`` as caches with one page per block. Raises `ValueError`."""
        if payload.dim() != 6 or payload.shape[2] not in (1, 2):
            raise ValueError(f"payloads of shape {tuple(payload.shape)} are not [blocks, layers, planes, ...]")
        layers = (payload if order == "NHD" else payload.transpose(3, 4)).unbind(1)
        return cls._of(layers, lambda layer: layer.transpose(0, 1))

    @classmethod
    def _of(cls, caches: Sequence[Tensor], canonical: Callable[[Tensor], Tensor]) -> PagedCaches:
        first = caches[0]
        for index, cache in enumerate(caches):
            if any(trait(cache) != trait(first) for trait in _TRAITS):
                raise ValueError(f"cache {index} differs from cache 0 in shape, strides, dtype or device")
        if 0 in first.shape:
            raise ValueError(f"a cache of shape {tuple(first.shape)} is empty")
        if first.stride(-1) != 1:
            raise ValueError(f"the last axis of a cache must be contiguous, its stride is {first.stride(-1)}")
        pages = tuple(canonical(as_integers(cache)) for cache in caches)
        return cls(pages, first.dtype, _disjoint(pages), _joined(pages))

    @property
    def layers(self) -> int:
        return len(self.pages)

    @property
    def planes(self) -> int:
        return self.pages[0].shape[0]

    @property
    def num_pages(self) -> int:
        return self.pages[0].shape[1]

    @property
    def page_tokens(self) -> int:
        return self.pages[0].shape[2]

    @property
    def heads(self) -> int:
        return self.pages[0].shape[3]

    @property
    def dim(self) -> int:
        return self.pages[0].shape[4]

    @property
    def device(self) -> torch.device:
        return self.pages[0].device

    def payload_shape(self, block_tokens: int, order: PayloadOrder) -> tuple[int, ...]:
        """Return the shape of one block's payload."""
        inner = (block_tokens, self.heads) if order == "NHD" else (self.heads, block_tokens)
        return (self.layers, self.planes, *inner, self.dim)


def as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers of its element size. Raises `ValueError` if there are none of that size."""
    size = tensor.element_size()
    if size not in _INTEGER_OF_SIZE:
        raise ValueError(f"elements of {tensor.dtype} cannot be moved")
    return tensor.view(_INTEGER_OF_SIZE[size])


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _canonical(cache: Tensor, layout: CacheLayout) -> Tensor:
    shape = tuple(cache.shape)
    if len(shape) == _AXES[layout]:
        match layout:
            case "2PNHD" if shape[0] == 2:
                return cache
            case "P2NHD" if shape[1] == 2:
                return cache.transpose(0, 1)
            case "PHN2D" if shape[3] % 2 == 0:
                return cache.view(*shape[:3], 2, shape[3] // 2).permute(3, 0, 2, 1, 4)
            case "PND":
                return cache[None, :, :, None]
    raise ValueError(f"a cache of shape {shape} is not {layout}")


def _disjoint(views: Sequence[Tensor]) -> bool:
    """Say whether all elements of equally strided views certainly have addresses of their own."""
    view = views[0]
    size = view.element_size()
    axes = [(stride * size, count) for stride, count in zip(view.stride(), view.shape, strict=True)]
    addresses = sorted(v.data_ptr() for v in views)
    gaps = [after - before for before, after in pairwise(addresses)]
    start, end = extent(view)
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


def _joined(views: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(map(extent, views)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def overlaps(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    """Say whether any of `first`'s ranges shares an address with any of `second`'s, which do not overlap themselves."""
    ends = [end for _, end in second]
    for start, end in first:
        at = bisect_right(ends, start)
        if start < end and at < len(second) and second[at][0] < end:
            return True
    return False
