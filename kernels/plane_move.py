"""What a move between paged KV caches and byte planes is, checked before any byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from tierkv.kernels.page_move import check_apart, check_blocks, check_order, check_table, check_written_pages
from tierkv.kernels.paged_caches import PagedCaches, PayloadOrder

__all__ = ["PLANE_ALIGNMENT", "PlaneMove", "PlaneSizes", "plan_merge", "plan_split"]

PLANE_ALIGNMENT = 16
"""What the offsets of planes within their buffer are multiples of, in bytes."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class PlaneSizes:
    """Where the planes of a block lie in their buffer: the same for every block of a shape.

    Attributes
    ----------
    names
        Of the planes, in their order.
    sizes, offsets
        In bytes.
    nbytes
        Of the buffer.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, order: PayloadOrder) -> PlaneSizes:
        """Return the planes of payloads of `shape`. Raises `ValueError` for a dtype that has none."""
        if dtype not in _DTYPES:
            raise ValueError(f"values of {dtype} have no planes: use a floating-point dtype of at most 4 bytes")
        values = prod(shape)
        sizes = {"peaks": values // shape[2 if order == "NHD" else 3], "residuals": values}
        if dtype.itemsize > 1:
            sizes = {"rest": values, **sizes}
        if dtype.itemsize > 2:
            sizes = {"low": 2 * values, **sizes}
        *offsets, end = accumulate(
            (-(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT for size in sizes.values()), initial=0
        )
        return cls(tuple(sizes), tuple(sizes.values()), tuple(offsets), end)

    def offset(self, name: str) -> int:
        """Return where a plane begins; 0 for one that the dtype does not have."""
        return self.offsets[self.names.index(name)] if name in self.names else 0


@dataclass(frozen=True, slots=True)
class PlaneMove:
    """A checked move. All tensors are views of the caller's memory.

    Attributes
    ----------
    caches
        The engine's side.
    table
        Page ids, int64 ``[blocks, pages_per_block]`` on the CPU; negative for no page.
    buffers
        Per block uint8 ``[sizes.nbytes]``, contiguous.
    sizes
        What lies where in a buffer.
    order
        Order of the values, and of the payload that the planes stand for.
    """

    caches: PagedCaches
    table: Tensor
    buffers: tuple[Tensor, ...]
    sizes: PlaneSizes
    order: PayloadOrder

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Shape of the payload that the planes of one block stand for."""
        return self.caches.payload_shape(self.table.shape[1] * self.caches.page_tokens, self.order)


def plan_split(
    caches: PagedCaches, table: Tensor, buffers: Tensor | Sequence[Tensor], order: PayloadOrder
) -> PlaneMove:
    """Check a move from pages to planes. Raises `ValueError` naming what does not fit."""
    move = _plan(caches, table, buffers, order)
    check_apart(move.buffers)
    return move


def plan_merge(
    buffers: Tensor | Sequence[Tensor], table: Tensor, caches: PagedCaches, order: PayloadOrder
) -> PlaneMove:
    """Check a move from planes to pages. Raises `ValueError` naming what does not fit."""
    move = _plan(caches, table, buffers, order)
    check_written_pages(caches, move.table)
    return move


def _plan(caches: PagedCaches, table: Tensor, buffers: Tensor | Sequence[Tensor], order: PayloadOrder) -> PlaneMove:
    check_order(order)
    table = check_table(caches, table)
    shape = caches.payload_shape(table.shape[1] * caches.page_tokens, order)
    sizes = PlaneSizes.of(shape, caches.dtype, order)
    blocks = check_blocks(caches, buffers, len(table), (sizes.nbytes,), torch.uint8)
    return PlaneMove(caches, table, tuple(blocks), sizes, order)
