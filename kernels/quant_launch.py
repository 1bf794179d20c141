"""Launches of the quantisation kernels: what they are told of caches and blocks, and how their work is cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tierkv.kernels.coding import Float8, Scheme, Uniform, views
from tierkv.kernels.float8_kernel import float8_codes_kernel, float8_values_kernel
from tierkv.kernels.page_table_kernel import byte_strides, device_table
from tierkv.kernels.paged_caches import PagedCaches
from tierkv.kernels.quant_kernel import channel_codes_kernel, channel_steps_kernel, row_codes_kernel, row_steps_kernel
from tierkv.kernels.quant_steps import limit, store_channels, store_rows

__all__ = ["decode", "encode"]

_WIDEST_UNIT = 16
_CHANNELS = 128  # of a tile
_STATISTICS_CHANNELS = 256
_TOKENS = 16
_TILE = 2048  # values of a tile of tokens and channels
_IN_FLIGHT = 8  # tokens whose loads are in flight in statistics
_WORDS = {torch.bfloat16: tl.int16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class _Work:
    """One call: its tensors, and the arguments that its kernels share."""

    caches: PagedCaches
    scheme: Scheme
    coded: Tensor
    table: Tensor
    pages: int
    unit: int

    @classmethod
    def of(cls, caches: PagedCaches, table: Tensor, scheme: Scheme, coded: Tensor) -> _Work:
        addresses = (pages.data_ptr() for pages in caches.pages)
        unit = gcd(_WIDEST_UNIT, caches.dim * caches.dtype.itemsize, *byte_strides(caches.pages[0])[:-1], *addresses)
        return cls(caches, scheme, coded, device_table(caches, table, coded.unbind(0)), table.shape[1], unit)

    @property
    def blocks(self) -> int:
        return len(self.coded)

    def strides(self, *, planes: bool) -> dict[str, int]:
        """Return the cache's strides in units, with the one from K to V if asked for."""
        plane, page, token, head, _ = (stride // self.unit for stride in byte_strides(self.caches.pages[0]))
        strides = {"page_stride": page, "token_stride": token, "head_stride": head}
        return strides | {"plane_stride": plane} if planes else strides

    def constants(self) -> dict[str, Any]:
        return {
            "PAGES": self.pages,
            "PAGE_TOKENS": self.caches.page_tokens,
            "WORD": _WORDS[self.caches.dtype],
            "UNIT": self.unit,
        }

    def rows(self) -> dict[str, Any]:
        """Return the arguments of kernels that take a head at a time."""
        shape = self.scheme.shape
        return self.constants() | {
            "HEADS": shape.heads,
            "DIM": shape.dim,
            "ROW_TOKEN": shape.strides[0] // shape.dim,
            "ROW_HEAD": shape.strides[1] // shape.dim,
            "TOKENS": self.tokens(triton.next_power_of_2(shape.dim)),
            "TILE": triton.next_power_of_2(shape.dim),
        }

    def tokens(self, channels: int) -> int:
        """Return the tokens of a tile of so many channels."""
        page_tokens: int = triton.next_power_of_2(self.caches.page_tokens)
        return min(_TOKENS, page_tokens, max(1, _TILE // channels))

    def channels(self, tile: int) -> dict[str, Any]:
        """Return the arguments of kernels that take a tile of channels at a time."""
        shape = self.scheme.shape
        *_, head, _ = byte_strides(self.caches.pages[0])
        channels = shape.heads * shape.dim
        joined = shape.order == "NHD" and head == shape.dim * self.caches.dtype.itemsize
        return self.constants() | {
            "CHANNELS": channels,
            "DIM": channels if joined else shape.dim,
            "TILE": min(tile, triton.next_power_of_2(channels)),
        }

    def sections(self, **names: str) -> dict[str, int]:
        """Return offsets of sections, by the names of a kernel's arguments."""
        sections = self.scheme.sections
        return {argument: sections[name].offset for argument, name in names.items()}

    @property
    def limit_bits(self) -> int:
        return int(np.float32(limit(self.caches.dtype)).view(np.int32))


def encode(caches: PagedCaches, table: Tensor, scheme: Scheme, coded: Tensor) -> Tensor:
    """Queue the coding of checked blocks on the current stream; return which could be, bool ``[blocks]``."""
    work = _Work.of(caches, table, scheme, coded)
    with torch.cuda.device_of(coded):  # type: ignore[no-untyped-call]
        return _encode_float8(work) if isinstance(scheme, Float8) else _encode_uniform(work, scheme)


def decode(coded: Tensor, scheme: Scheme, table: Tensor, caches: PagedCaches) -> None:
    """Queue the restoring of checked blocks on the current stream."""
    work = _Work.of(caches, table, scheme, coded)
    with torch.cuda.device_of(coded):  # type: ignore[no-untyped-call]
        if isinstance(scheme, Float8):
            shape = scheme.shape
            float8_values_kernel[shape.heads * work.pages, work.blocks * shape.layers * shape.planes](
                work.table,
                shape.layers,
                work.blocks,
                **work.strides(planes=True),
                **work.sections(CODES="codes", SCALES="scales"),
                PLANES=shape.planes,
                **work.rows(),
                enable_fp_fusion=False,
            )
            return
        _code_channels(work, encode=False)
        if scheme.shape.planes == 2:
            _code_rows(work, encode=False)


def _encode_float8(work: _Work) -> Tensor:
    shape = work.scheme.shape
    fits = torch.empty(
        work.blocks, shape.layers * shape.planes * shape.heads, dtype=torch.int8, device=work.coded.device
    )
    float8_codes_kernel[shape.heads, work.blocks * shape.layers * shape.planes](
        work.table,
        fits,
        shape.layers,
        work.blocks,
        **work.strides(planes=True),
        **work.sections(CODES="codes", SCALES="scales"),
        LIMIT=work.limit_bits,
        PLANES=shape.planes,
        **work.rows(),
        enable_fp_fusion=False,
    )
    return fits.all(1)


def _encode_uniform(work: _Work, scheme: Uniform) -> Tensor:
    shape, sections = scheme.shape, views(scheme, work.coded)
    chosen = torch.empty_like(sections["k_steps"], dtype=torch.int16, memory_format=torch.contiguous_format)
    means = torch.empty_like(chosen, dtype=torch.float32)
    arguments = work.channels(_STATISTICS_CHANNELS)
    channel_steps_kernel[triton.cdiv(arguments["CHANNELS"], arguments["TILE"]), work.blocks * shape.layers](
        work.table,
        chosen,
        means,
        float(scheme.fineness[0]),
        shape.layers,
        work.blocks,
        **work.strides(planes=False),
        LIMIT=work.limit_bits,
        COUNT=gcd(_IN_FLIGHT, work.caches.page_tokens),
        **arguments,
        num_warps=1,
        enable_fp_fusion=False,
    )
    fits = store_channels(sections, chosen, means)
    _code_channels(work, encode=True)
    if shape.planes == 2:
        chosen = torch.empty_like(sections["v_steps"], dtype=torch.int16, memory_format=torch.contiguous_format)
        row_steps_kernel[shape.heads * work.pages, work.blocks * shape.layers](
            work.table,
            chosen,
            float(scheme.fineness[1]),
            shape.layers,
            work.blocks,
            **work.strides(planes=True),
            LIMIT=work.limit_bits,
            **work.rows(),
            enable_fp_fusion=False,
        )
        fits &= store_rows(sections, chosen)
        _code_rows(work, encode=True)
    return fits


def _code_channels(work: _Work, *, encode: bool) -> None:
    shape = work.scheme.shape
    arguments = work.channels(_CHANNELS)
    tiles = triton.cdiv(arguments["CHANNELS"], arguments["TILE"])
    channel_codes_kernel[tiles, work.blocks * shape.layers](
        work.table,
        shape.layers,
        work.blocks,
        **work.strides(planes=False),
        **work.sections(
            CODES="k_codes", STEPS="k_steps", CENTERS_LOW="centers_low", CENTERS_HIGH="centers_high", PEAKS="k_peaks"
        ),
        **arguments,
        CODE_TOKEN=shape.strides[0],
        CODE_HEAD=shape.strides[1],
        TOKENS=work.tokens(arguments["TILE"]),
        ENCODE=encode,
        enable_fp_fusion=False,
    )


def _code_rows(work: _Work, *, encode: bool) -> None:
    shape = work.scheme.shape
    row_codes_kernel[shape.heads * work.pages, work.blocks * shape.layers](
        work.table,
        shape.layers,
        work.blocks,
        **work.strides(planes=True),
        **work.sections(CODES="v_codes", STEPS="v_steps", PEAKS="v_peaks"),
        **work.rows(),
        ENCODE=encode,
        enable_fp_fusion=False,
    )
