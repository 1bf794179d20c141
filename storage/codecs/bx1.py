"""Codec ``bx1``: lossless, by coding exponents relative to the peak of their channel.

Values of one channel (one position in every axis but the token axis) share a scale, so the distance of an exponent from
the largest one of its channel takes few values, and a Huffman coder makes it short. Signs and mantissas are noise and
stay as they are. Everything is integer arithmetic on bit patterns: NaN, infinities and denormals need no special care.

    dtype               planes, in order; n values, c channels
    float32             low (2n bytes), rest (n), peaks (c), residuals (n)
    bfloat16, float16                   rest (n), peaks (c), residuals (n)
    float8_*                                      peaks (c), residuals (n)
    uint8               the bytes (n)

Residuals that are small, as those of a bfloat16's or a float32's exponents, are coded in pairs. The exact bits of each
plane are in docs/container.md.

Splitting into planes and coding planes are two steps, and a GPU can do the first: `tierkv.kernels.planes` makes and
merges the very planes that `Bx1.encode_planes` and `Bx1.decode_planes_into` deal with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.spec import DTYPE_BYTES, BlockLayout
from tierkv.storage.codecs.base import Buffer, Bytes, Codec, as_bytes, malformed
from tierkv.storage.codecs.bits import merge_halves, merge_words, split_halves, split_words
from tierkv.storage.codecs.pairs import SECTIONS, join_pairs, padded_size, split_pairs
from tierkv.storage.codecs.plane import expand, expand_into, scratch, shrink, shrink_opaque

__all__ = ["Bx1"]

_ALIGNMENT = 16  # of planes that lie in one buffer: what a GPU loads at once, and what pairs are padded to
# Values per numpy call: fewer, and threads spend their time handing the interpreter lock to each other.
_STRIDE = 1024 * 1024

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Grid:
    """A layout as codecs see it: `groups` x `tokens` x `channels` values, one peak per group and channel."""

    groups: int
    tokens: int
    channels: int
    itemsize: int

    @classmethod
    def of(cls, layout: BlockLayout) -> _Grid:
        axis = layout.token_axis
        return cls(
            prod(layout.shape[:axis]), layout.shape[axis], prod(layout.shape[axis + 1 :]), DTYPE_BYTES[layout.dtype]
        )

    @property
    def values(self) -> int:
        return self.groups * self.tokens * self.channels

    @property
    def plane_sizes(self) -> list[int]:
        """Bytes per plane, in the order of the sections."""
        peaks_and_residuals = [self.groups * self.channels, self.values]
        return {1: [], 2: [self.values], 4: [2 * self.values, self.values]}[self.itemsize] + peaks_and_residuals

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds all planes."""
        return sum(map(_aligned, self.plane_sizes))

    def planes_in(self, buffer: Bytes) -> list[Bytes]:
        """Return the planes that lie in a buffer of `nbytes`, each at a multiple of 16 bytes."""
        starts = accumulate(map(_aligned, self.plane_sizes), initial=0)
        return [buffer[start : start + size] for start, size in zip(starts, self.plane_sizes, strict=False)]

    def per_value(self, flat: _Array) -> _Array:
        return flat.reshape(self.groups, self.tokens, self.channels)

    def per_channel(self, flat: _Array) -> _Array:
        return flat.reshape(self.groups, 1, self.channels)

    def slices(self) -> Iterator[slice]:
        """Yield runs of whole groups of at least `_STRIDE` values."""
        step = -(-_STRIDE // (self.tokens * self.channels))
        for start in range(0, self.groups, step):
            yield slice(start, min(start + step, self.groups))


class Bx1(Codec):
    """Splits floats into planes and Huffman-codes exponent residuals; bytes of unknown meaning go through zstd."""

    name = "bx1"
    id = 1

    def encode(self, payload: Buffer, layout: BlockLayout) -> list[Bytes]:
        data = as_bytes(payload)
        if not data.size:
            return []
        if layout.dtype == "uint8":
            return [shrink_opaque(data)]
        planes = scratch("planes", self.planes_nbytes(layout))
        grid = _Grid.of(layout)
        _split(data, grid.planes_in(planes), grid)
        return _shrink(planes, grid)

    def decode_into(self, sections: Sequence[memoryview], out: memoryview, layout: BlockLayout) -> None:
        if not len(out):
            if sections:
                raise malformed(self, f"{len(sections)} sections for nothing")
            return
        try:
            if layout.dtype == "uint8":
                (section,) = sections
                expand_into(section, as_bytes(out))
                return
            grid = _Grid.of(layout)
            planes = _planes(sections, grid)
        except ValueError as error:
            raise malformed(self, str(error)) from error
        _merge(planes, as_bytes(out), grid)

    def planes_nbytes(self, layout: BlockLayout) -> int:
        """Return how many bytes the planes of a block take: in the order of the module, each at a multiple of 16."""
        return layout.nbytes if layout.dtype == "uint8" else _Grid.of(layout).nbytes

    def encode_planes(self, planes: bytearray | memoryview, layout: BlockLayout) -> list[Bytes]:
        """Code planes that are split already, `planes_nbytes` writable bytes: as `encode` codes their payload.

        The buffer serves as working memory, and its residuals are lost. The sections may be views of it.
        """
        data = as_bytes(planes)
        if not data.size:
            return []
        return [shrink_opaque(data)] if layout.dtype == "uint8" else _shrink(data, _Grid.of(layout))

    def decode_planes_into(self, sections: Sequence[memoryview], planes: memoryview, layout: BlockLayout) -> None:
        """Fill `planes`, `planes_nbytes` writable bytes, with the planes, which `decode_into` would go on to merge.

        What lies between planes is undefined. Raises `CorruptBlock` as `decode_into` does.
        """
        if layout.dtype == "uint8" or not layout.nbytes:
            return self.decode_into(sections, planes, layout)
        grid = _Grid.of(layout)
        data = as_bytes(planes)
        *others, residuals = grid.planes_in(data)
        try:
            coded = _residual_sections(sections, len(others))
            for section, plane in zip(sections, others, strict=False):
                expand_into(section, plane)
            if len(coded) == 1:
                expand_into(coded[0], residuals)
            else:
                split_pairs(coded, data[-padded_size(residuals.size) :], residuals.size)
        except ValueError as error:
            raise malformed(self, str(error)) from error


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shrink(planes: Bytes, grid: _Grid) -> list[Bytes]:
    """Code the planes in a buffer of `grid.nbytes`; the residuals are lost."""
    *others, residuals = grid.planes_in(planes)
    padded = planes[-padded_size(residuals.size) :]
    return [*map(shrink, others), *(join_pairs(padded, residuals.size) or [shrink(residuals)])]


def _residual_sections(sections: Sequence[memoryview], others: int) -> Sequence[memoryview]:
    """Return the sections after the `others` first. Raises `ValueError` when they cannot be those of residuals."""
    if len(sections) - others not in (1, SECTIONS):
        raise ValueError(f"{len(sections)} sections")
    return sections[others:]


def _planes(sections: Sequence[memoryview], grid: _Grid) -> list[Bytes]:
    """Decode the planes. Raises `ValueError` when the sections are not theirs."""
    *sizes, size = grid.plane_sizes
    coded = _residual_sections(sections, len(sizes))
    if len(coded) == 1:
        residuals = expand(coded[0], size, "residuals")
    else:
        padded = scratch("residuals", padded_size(size))
        split_pairs(coded, padded, size)
        residuals = padded[:size]
    others = zip(sections, sizes, strict=False)
    return [*(expand(section, n, f"plane {i}") for i, (section, n) in enumerate(others)), residuals]


def _split(data: Bytes, planes: list[Bytes], grid: _Grid) -> None:
    """Fill `planes` from the payload `data`."""
    *others, peak_plane, residual_plane = planes
    values = grid.per_value(data.view(f"<u{grid.itemsize}"))
    peaks, residuals = grid.per_channel(peak_plane), grid.per_value(residual_plane)
    for part in grid.slices():
        codes = residuals[part]
        if grid.itemsize == 1:
            np.bitwise_and(values[part], 0x7F, out=codes)
        else:
            halves = values[part]
            if grid.itemsize == 4:
                halves = _halves(codes.shape)
                split_words(values[part], halves, grid.per_value(others[0].view("<u2"))[part])
            split_halves(halves, codes, grid.per_value(others[-1])[part])
        _peaks(codes, peaks[part])
        # a whole float8 is subtracted, not its code: modulo 256 its sign comes out as the residual's top bit
        np.subtract(peaks[part], values[part] if grid.itemsize == 1 else codes, out=codes)


def _peaks(codes: _Array, peaks: _Array) -> None:
    """Fill `peaks` with the largest code of each group and channel: by halves, since numpy reduces token by token."""
    groups, tokens, channels = codes.shape
    larger = scratch("larger", groups * (tokens // 2) * channels).reshape(groups, tokens // 2, channels)
    while tokens > 1:
        half = tokens // 2
        np.maximum(codes[:, :half], codes[:, half : 2 * half], out=larger[:, :half])
        if tokens % 2:
            np.maximum(larger[:, :1], codes[:, tokens - 1 : tokens], out=larger[:, :1])
        codes, tokens = larger, half
    np.copyto(peaks, codes[:, :1])


def _merge(planes: list[Bytes], out: Bytes, grid: _Grid) -> None:
    """Inverse of `_split`."""
    *others, peak_plane, residual_plane = planes
    values = grid.per_value(out.view(f"<u{grid.itemsize}"))
    peaks, residuals = grid.per_channel(peak_plane), grid.per_value(residual_plane)
    for part in grid.slices():
        if grid.itemsize == 1:
            np.subtract(peaks[part], residuals[part], out=values[part])
            continue
        codes = scratch("codes", residuals[part].size).reshape(residuals[part].shape)
        np.subtract(peaks[part], residuals[part], out=codes)
        rest = grid.per_value(others[-1])[part]
        if grid.itemsize == 2:
            merge_halves(codes, rest, values[part])
        else:
            halves = _halves(codes.shape)
            merge_halves(codes, rest, halves)
            merge_words(halves, grid.per_value(others[0].view("<u2"))[part], values[part])


def _halves(shape: tuple[int, ...]) -> _Array:
    return scratch("halves", 2 * prod(shape)).view("<u2").reshape(shape)
