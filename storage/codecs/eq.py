"""Codecs ``eq2`` .. ``eq5`` and ``int8``: lossy, by uniform quantisers made for keys and for values.

Keys have channels of very different scale and offset, the same for all tokens, so every channel has its own step and
center. Values have tokens of different scale, so every token and head has its own step. The codes are Huffman-coded:
what a finer step costs is bits, and rare large values need no scale of their own. MLA latents are coded as keys.

    planes, in order; n values of K and of V each, c channels, r rows
    K and V     k peaks, k steps (c), k centers (c, c), v peaks, v steps (r), k codes (n), v codes (n)
    latents     k peaks, k steps (c), k centers (c, c), k codes (n)

Blocks without K and V, with values that are not finite or too large to be KV, are `Unsuitable`. The exact bits of each
plane are in docs/container.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tierkv.spec import BlockLayout
from tierkv.storage.codecs.base import Buffer, Bytes, Codec, Unsuitable, as_bytes, malformed
from tierkv.storage.codecs.floats import WORDS, narrow, widen
from tierkv.storage.codecs.plane import expand, scratch, shrink
from tierkv.storage.codecs.quant import LIMIT, quantize_channels, quantize_rows, restore_channels, restore_rows, within

__all__ = ["Eq2", "Eq3", "Eq4", "Eq5", "Int8"]

# Values per numpy call: fewer, and threads spend their time handing the interpreter lock to each other.
_STRIDE = 256 * 1024
_FLOAT16_LIMIT = 2.0**15  # half of what it can hold: a restored value is off by at most as much

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Grid:
    """A layout as quantisers see it.

    Keys are `layers` x `outer` x `tokens` x `channels`, values `layers` x `rows` x `dims`.
    """

    dtype: str
    layers: int
    planes: int
    outer: int
    tokens: int
    channels: int
    dims: int

    @classmethod
    def of(cls, layout: BlockLayout) -> _Grid | None:
        """Return None where there are no keys and values to tell apart, or none at all."""
        shape, axis = layout.shape, layout.token_axis
        if layout.dtype not in WORDS or len(shape) != 5 or shape[1] not in (1, 2) or axis not in (2, 3) or 0 in shape:
            return None
        return cls(
            layout.dtype, shape[0], shape[1], prod(shape[2:axis]), shape[axis], prod(shape[axis + 1 :]), shape[4]
        )

    @property
    def rows(self) -> int:
        return self.outer * self.tokens * self.channels // self.dims

    @property
    def plane_sizes(self) -> list[int]:
        """Bytes per plane, in the order of the sections."""
        peaks, channels = 2 * self.layers, self.layers * self.outer * self.channels
        codes = channels * self.tokens
        keys = [peaks, channels, channels, channels]
        return [*keys, codes] if self.planes == 1 else [*keys, peaks, self.layers * self.rows, codes, codes]

    def slices(self) -> Iterator[slice]:
        """Yield runs of whole layers of at least `_STRIDE` keys."""
        step = -(-_STRIDE // (self.outer * self.tokens * self.channels))
        for start in range(0, self.layers, step):
            yield slice(start, min(start + step, self.layers))


class _Parts:
    """The planes of a block as arrays, and its payload as keys and values."""

    def __init__(self, grid: _Grid, planes: Sequence[Bytes], payload: Bytes) -> None:
        per_channel = (grid.layers, grid.outer, 1, grid.channels)
        keys = (grid.layers, grid.outer, grid.tokens, grid.channels)
        rows = (grid.layers, grid.rows, grid.dims)
        both = payload.view(WORDS[grid.dtype]).reshape(grid.layers, grid.planes, *keys[1:])
        self.keys = both[:, 0]
        self.k_peaks = planes[0].view("<u2")
        self.k_steps, self.centers_low, self.centers_high = (plane.reshape(per_channel) for plane in planes[1:4])
        self.k_codes = planes[-grid.planes].view(np.int8).reshape(keys)
        if grid.planes == 2:
            self.values = both.reshape(grid.layers, 2, *rows[1:])[:, 1]
            self.v_peaks = planes[4].view("<u2")
            self.v_steps = planes[5].reshape(*rows[:2], 1)
            self.v_codes = planes[-1].view(np.int8).reshape(rows)


class _Quantized(Codec):
    """What the levels have in common; they differ in how fine they are, and only encoding knows.

    Attributes
    ----------
    fineness
        Steps of K in standard deviations of the channel, and of V in root mean squares of the token and head. Steps
        are larger where a code would not fit a byte; 0 asks for the smallest that do.
    """

    lossy = True
    fineness: ClassVar[tuple[float, float]]

    def encode(self, payload: Buffer, layout: BlockLayout) -> list[Bytes]:
        grid = _Grid.of(layout)
        if grid is None:
            raise Unsuitable
        planes = [scratch(f"plane {i}", size) for i, size in enumerate(grid.plane_sizes)]
        parts = _Parts(grid, planes, as_bytes(payload))
        for part in grid.slices():
            keys = _widened(parts.keys[part], grid.dtype)
            centers = np.empty(parts.k_steps[part].shape, "<i2")
            quantize_channels(
                keys, self.fineness[0], parts.k_codes[part], centers, parts.k_peaks[part], parts.k_steps[part]
            )
            np.copyto(parts.centers_low[part], centers & 0xFF, casting="unsafe")
            np.copyto(parts.centers_high[part], centers >> 8 & 0xFF, casting="unsafe")
            if grid.planes == 2:
                values = _widened(parts.values[part], grid.dtype)
                quantize_rows(values, self.fineness[1], parts.v_codes[part], parts.v_peaks[part], parts.v_steps[part])
        return [shrink(plane) for plane in planes]

    def decode_into(self, sections: Sequence[memoryview], out: memoryview, layout: BlockLayout) -> None:
        grid = _Grid.of(layout)
        if grid is None:
            raise malformed(self, f"a block of {layout}")
        sizes = grid.plane_sizes
        if len(sections) != len(sizes):
            raise malformed(self, f"{len(sections)} sections")
        try:
            planes = [expand(s, size, f"plane {i}") for i, (s, size) in enumerate(zip(sections, sizes, strict=True))]
            with np.errstate(over="ignore"):
                _restore(grid, _Parts(grid, planes, as_bytes(out)))
        except ValueError as error:
            raise malformed(self, str(error)) from error


def _widened(words: _Array, dtype: str) -> _Array:
    singles = _singles(words)
    widen(words, dtype, singles)
    if not within(singles, _FLOAT16_LIMIT if dtype == "float16" else LIMIT):
        raise Unsuitable
    return singles


def _restore(grid: _Grid, parts: _Parts) -> None:
    for part in grid.slices():
        singles = _singles(parts.keys[part])
        centers = parts.centers_high[part].view(np.int8).astype("<i2") << 8 | parts.centers_low[part]
        restore_channels(parts.k_codes[part], centers, parts.k_peaks[part], parts.k_steps[part], singles)
        narrow(singles, grid.dtype, parts.keys[part])
        if grid.planes == 2:
            singles = _singles(parts.values[part])
            restore_rows(parts.v_codes[part], parts.v_peaks[part], parts.v_steps[part], singles)
            narrow(singles, grid.dtype, parts.values[part])


def _singles(like: _Array) -> _Array:
    return scratch("singles", 4 * like.size).view("<f4").reshape(like.shape)


class Int8(_Quantized):
    """The smallest steps a byte allows: half the size of bfloat16, next to no loss."""

    name, id = "int8", 2
    fineness = (0, 0)


class Eq2(_Quantized):
    """About 2.5 times smaller than bfloat16."""

    name, id = "eq2", 3
    fineness = (1 / 16, 1 / 16)


class Eq3(_Quantized):
    """About 3.4 times smaller than bfloat16."""

    name, id = "eq3", 4
    fineness = (1 / 8, 1 / 4)


class Eq4(_Quantized):
    """About 4.3 times smaller than bfloat16."""

    name, id = "eq4", 5
    fineness = (1 / 4, 1 / 2)


class Eq5(_Quantized):
    """About 5.7 times smaller than bfloat16."""

    name, id = "eq5", 6
    fineness = (1 / 2, 1)
