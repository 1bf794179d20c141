"""What quantised blocks look like: schemes, and where the parts of a coded block lie.

A coded block is one run of bytes, `nbytes` long, of sections that begin at multiples of 16. Those of `Uniform` are the
planes of the lossy codecs in docs/container.md, under the same names and with the same bits, so either side can write
what the other reads; only Huffman coding is left to a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tierkv.kernels.paged_caches import PayloadOrder

__all__ = ["ALIGNMENT", "BlockShape", "Float8", "Scheme", "Section", "Uniform", "views"]

ALIGNMENT = 16
"""What the address of a coded block and the offset of each section are multiples of, in bytes."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a block's payload.

    Attributes
    ----------
    layers, planes, tokens, heads, dim
        ``[layers, planes, tokens, heads, dim]`` in order ``NHD``, ``[layers, planes, heads, tokens, dim]`` in ``HND``.
        Planes are 2: K and V; or 1: MLA latents, of one head.
    order
        Which of the two.
    """

    layers: int
    planes: int
    tokens: int
    heads: int
    dim: int
    order: PayloadOrder = "NHD"

    def __post_init__(self) -> None:
        if min(self.layers, self.tokens, self.heads, self.dim) < 1 or self.planes not in (1, 2):
            raise ValueError(f"no block has the shape {self}")

    @property
    def payload(self) -> tuple[int, ...]:
        return (self.layers, self.planes, *self.rows, self.dim)

    @property
    def rows(self) -> tuple[int, int]:
        """Tokens and heads, in their order."""
        return (self.tokens, self.heads) if self.order == "NHD" else (self.heads, self.tokens)

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one token, and from one head, to the next."""
        return (self.heads * self.dim, self.dim) if self.order == "NHD" else (self.dim, self.tokens * self.dim)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a coded block: `shape` elements of `dtype`, C order, from byte `offset`."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Uniform:
    """Eight-bit codes: K (or latents) with a step and a center per channel, V with a step per token and head.

    Attributes
    ----------
    shape
        Of the payload.
    fineness
        Steps of K in standard deviations of the channel, and of V in root mean squares of the token and head; steps
        are larger where a code would not fit a byte, and 0 asks for the smallest that do. Only encoding looks at it.
        Both from 0 to 1.
    """

    shape: BlockShape
    fineness: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not all(0 <= fineness <= 1 for fineness in self.fineness):
            raise ValueError(f"steps are from 0 to 1 deviations, not {self.fineness}")

    @property
    def sections(self) -> Mapping[str, Section]:
        shape = self.shape
        channels, codes = (shape.layers, shape.heads, shape.dim), (shape.layers, *shape.rows, shape.dim)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"k_codes": (codes, torch.int8)}
        if shape.planes == 2:
            sizes["v_codes"] = (codes, torch.int8)
        for name in ("k_steps", "centers_low", "centers_high"):
            sizes[name] = (channels, torch.uint8)
        sizes["k_peaks"] = ((shape.layers,), torch.int16)
        if shape.planes == 2:
            sizes["v_steps"] = ((shape.layers, *shape.rows), torch.uint8)
            sizes["v_peaks"] = ((shape.layers,), torch.int16)
        return _placed(sizes)

    @property
    def nbytes(self) -> int:
        return _end(self.sections)


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn codes, and a power of two per layer, plane and head that they are multiplied with.

    The smallest power of two that lets the head's largest magnitude fit: a floating-point code would gain nothing from
    a finer scale but range, and products with this one are exact.
    """

    shape: BlockShape

    @property
    def sections(self) -> Mapping[str, Section]:
        shape = self.shape
        scales = (shape.layers, shape.planes, shape.heads)
        return _placed({"codes": (shape.payload, torch.float8_e4m3fn), "scales": (scales, torch.float32)})

    @property
    def nbytes(self) -> int:
        return _end(self.sections)


Scheme = Uniform | Float8


def views(scheme: Scheme, coded: Tensor) -> dict[str, Tensor]:
    """Return the sections of coded blocks, uint8 ``[blocks, nbytes]``, as views ``[blocks, *shape]`` by name."""
    found = {}
    for name, section in scheme.sections.items():
        plane = coded[:, section.offset : section.offset + section.nbytes].view(section.dtype)
        found[name] = plane.view(len(coded), *section.shape)
    return found


def _placed(sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Section]:
    sections: dict[str, Section] = {}
    for name, (shape, dtype) in sizes.items():
        sections[name] = Section(_end(sections), shape, dtype)
    return sections


def _end(sections: Mapping[str, Section]) -> int:
    """Return the first aligned byte after the last section."""
    last = max((section.offset + section.nbytes for section in sections.values()), default=0)
    return -(-last // ALIGNMENT) * ALIGNMENT
