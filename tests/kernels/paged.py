"""Drawn moves between pages and blocks: layouts, orders, strides, alignments, null pages, and buffers full of NaNs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tierkv.kernels.paged_caches import CacheLayout, PagedCaches, PayloadOrder

POISON = 0xA5


@dataclass(frozen=True)
class Problem:
    """One drawn move. Its buffers hold random bytes, so NaNs of every kind are among them.

    `permuted` caches lie with heads before tokens (or after, for PHN2D). Layers lie apart or interleaved in one
    allocation, `skew` elements into it, with `tail` unused elements behind each row. Blocks lie in one tensor with
    `gap` elements behind each, or `scattered`: in tensors of their own, the last one first.
    """

    layout: CacheLayout
    order: PayloadOrder
    dtype: torch.dtype
    pages: int
    page_tokens: int
    heads: int
    dim: int
    layers: int
    table: tuple[tuple[int, ...], ...]
    permuted: bool = False
    interleaved: bool = False
    tail: int = 0
    skew: int = 0
    gap: int = 0
    scattered: bool = False

    @property
    def planes(self) -> int:
        return 1 if self.layout == "PND" else 2

    @property
    def ids(self) -> Tensor:
        return torch.tensor(self.table, dtype=torch.int32).reshape(len(self.table), -1)

    @property
    def block_tokens(self) -> int:
        return self.ids.shape[1] * self.page_tokens

    @property
    def block_shape(self) -> tuple[int, ...]:
        if self.order == "NHD":
            return (self.layers, self.planes, self.block_tokens, self.heads, self.dim)
        return (self.layers, self.planes, self.heads, self.block_tokens, self.dim)

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Make the engine's tensors."""
        p, n, h, d = self.pages, self.page_tokens, self.heads, self.dim
        match self.layout, self.permuted:
            case "2PNHD", False:
                shape, swap = (2, p, n, h, d), None
            case "2PNHD", True:
                shape, swap = (2, p, h, n, d), (2, 3)
            case "P2NHD", False:
                shape, swap = (p, 2, n, h, d), None
            case "P2NHD", True:
                shape, swap = (p, 2, h, n, d), (2, 3)
            case "PHN2D", False:
                shape, swap = (p, h, n, 2 * d), None
            case "PHN2D", True:
                shape, swap = (p, n, h, 2 * d), (1, 2)
            case _:
                shape, swap = (p, n, d), None
        wide = (*shape[:-1], shape[-1] + self.tail)
        count = self.layers * torch.Size(wide).numel()
        flat = random_bytes((count + self.skew) * self.dtype.itemsize, device).view(self.dtype)[self.skew :]
        if self.interleaved:
            layers = flat.view(wide[0], self.layers, *wide[1:]).unbind(1)
        else:
            layers = flat.view(self.layers, *wide).unbind(0)
        tensors = [layer[..., : shape[-1]] for layer in layers]
        return [tensor.transpose(*swap) for tensor in tensors] if swap else tensors

    def paged(self, tensors: list[Tensor]) -> PagedCaches:
        return PagedCaches.of(tensors, self.layout)

    def padded(self, nbytes: int, device: torch.device) -> Tensor:
        """Return room for `nbytes` per block, poisoned, as bytes ``[blocks, nbytes + gap]``."""
        gap = self.gap * self.dtype.itemsize
        return torch.full((len(self.table), nbytes + gap), POISON, dtype=torch.uint8, device=device)

    def laid_out(self, blocks: Tensor) -> Tensor | list[Tensor]:
        """Return blocks as one tensor, or as scattered ones."""
        return list(blocks.unbind(0))[::-1] if self.scattered else blocks

    def poisoned(self, device: torch.device) -> tuple[Tensor, Tensor | list[Tensor]]:
        """Return poisoned room, and the payloads in it."""
        count = torch.Size(self.block_shape).numel()
        padded = self.padded(count * self.dtype.itemsize, device)
        return padded, self.laid_out(padded.view(self.dtype)[:, :count].view(-1, *self.block_shape))

    def payloads(self, device: torch.device) -> Tensor | list[Tensor]:
        """Make payloads of random bytes."""
        padded, blocks = self.poisoned(device)
        padded.copy_(random_bytes(padded.numel(), device).view(padded.shape))
        return blocks

    def gaps(self, padded: Tensor) -> bytes:
        return raw(padded[:, padded.shape[1] - self.gap * self.dtype.itemsize :])

    def rows(
        self, tensors: Sequence[Tensor], payloads: Tensor | Sequence[Tensor]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (page id, place in the cache, place in the payload) per row, straight from the layouts' definitions."""
        for block, ids in enumerate(self.table):
            for nth, page in enumerate(ids):
                for layer, cache in enumerate(tensors):
                    for plane in range(self.planes):
                        for token in range(self.page_tokens):
                            for head in range(self.heads):
                                place = self._place(cache, plane, max(page, 0), token, head)
                                run = payloads[block][layer, plane]
                                at = nth * self.page_tokens + token
                                yield page, place, run[at, head] if self.order == "NHD" else run[head, at]

    def _place(self, cache: Tensor, plane: int, page: int, token: int, head: int) -> Tensor:
        match self.layout:
            case "2PNHD":
                return cache[plane, page, token, head]
            case "P2NHD":
                return cache[page, plane, token, head]
            case "PHN2D":
                return cache[page, head, token, plane * self.dim : (plane + 1) * self.dim]
            case "PND":
                return cache[page, token]


def random_bytes(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8).to(device)


def raw(tensors: Tensor | Sequence[Tensor]) -> bytes:
    """Return the bytes of a tensor, or of several."""
    if not isinstance(tensors, Tensor):
        return b"".join(map(raw, tensors))
    return tensors.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@st.composite
def problems(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> Problem:
    layout = draw(st.sampled_from(["2PNHD", "P2NHD", "PHN2D", "PND"]))
    pages = draw(st.integers(1, 6))
    pages_per_block = draw(st.integers(1, 3))
    ids = draw(st.permutations([*range(pages), -1, -7, -1]))
    if draw(st.booleans()):
        ids = sorted(ids)  # runs of pages that follow each other, null pages first: as a window has them
    blocks = draw(st.integers(0, len(ids) // pages_per_block))
    return Problem(
        layout=layout,
        order=draw(st.sampled_from(["NHD", "HND"])),
        dtype=draw(st.sampled_from(dtypes)),
        pages=pages,
        page_tokens=draw(st.sampled_from([1, 2, 3, 8, 16])),
        heads=1 if layout == "PND" else draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 2, 5, 8, 24, 64])),
        layers=draw(st.integers(1, 3)),
        table=tuple(tuple(ids[b * pages_per_block : (b + 1) * pages_per_block]) for b in range(blocks)) or ((-1,),),
        permuted=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        tail=draw(st.sampled_from([0, 0, 0, 1, 8])),
        skew=draw(st.sampled_from([0, 0, 1, 2, 8])),
        gap=draw(st.sampled_from([0, 0, 1, 16])),
        scattered=draw(st.booleans()),
    )
