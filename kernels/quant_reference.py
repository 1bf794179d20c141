"""What the quantisation kernels must do, in plain torch: blocks that lie in pages go through a copy."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from tierkv.kernels.coding import BlockShape, Float8, Scheme, views
from tierkv.kernels.paged_caches import PagedCaches
from tierkv.kernels.pages import gather_blocks, scatter_blocks
from tierkv.kernels.quant_steps import LOW_BITS, SMALLEST_CODE, UNFIT_CODE, limit, store_channels, store_rows, unpack

__all__ = ["decode", "encode", "gathered", "scattered"]

_SMALLEST_SCALE = 127 - 100  # its exponent as float32 has it: 2**-100


def gathered(caches: PagedCaches, table: Tensor, shape: BlockShape) -> Tensor:
    """Return the blocks that lie in pages, ``[blocks, *shape.payload]``."""
    payloads = torch.empty(len(table), *shape.payload, dtype=caches.dtype, device=caches.device)
    gather_blocks(caches, table, payloads, order=shape.order)
    return payloads


def scattered(payloads: Tensor, caches: PagedCaches, table: Tensor, shape: BlockShape) -> None:
    """Put blocks into pages."""
    scatter_blocks(payloads, table, caches, order=shape.order)


def encode(payloads: Tensor, scheme: Scheme, coded: Tensor) -> Tensor:
    """Code blocks ``[blocks, *shape.payload]``; return which could be, bool ``[blocks]``."""
    sections = views(scheme, coded)
    if isinstance(scheme, Float8):
        values = payloads.float()
        axes = (4, 5) if scheme.shape.order == "HND" else (3, 5)
        reach = values.abs().amax(axes)
        # 448 is 1.75 * 2**8: rounded up to a whole exponent, mantissas above .75 carry
        exponent = ((reach.view(torch.int32) + 0x1FFFFF) >> 23) - 8
        scale = (exponent.clamp(_SMALLEST_SCALE, 254) << 23).view(torch.float32)
        sections["scales"].copy_(scale)
        sections["codes"].copy_((values / _per_head(scale, scheme.shape)).to(torch.float8_e4m3fn))
        return (reach <= limit(payloads.dtype)).flatten(1).all(1)
    keys = _as_channels(payloads[:, :, 0], scheme.shape).float()
    chosen, means = _channel_steps(keys, scheme.fineness[0], limit(payloads.dtype))
    fits = store_channels(sections, chosen.view_as(sections["k_steps"]), means.view_as(sections["k_steps"]))
    step, center = _channels(sections, scheme.shape)
    # torch has no conversion of what is beyond an int8, and blocks that do not fit have it
    codes = torch.round(keys * (1 / step)) - center
    sections["k_codes"].copy_(codes.nan_to_num().clamp(-128, 127).reshape(sections["k_codes"].shape))
    if scheme.shape.planes == 2:
        values = payloads[:, :, 1].float()
        fits &= store_rows(sections, _row_steps(values, scheme.fineness[1], limit(payloads.dtype)))
        codes = torch.round(values * (1 / unpack(sections["v_steps"], sections["v_peaks"]))[..., None])
        sections["v_codes"].copy_(codes.nan_to_num().clamp(-128, 127))
    return fits


def decode(coded: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return the payloads of coded blocks, ``[blocks, *shape.payload]``."""
    shape, sections = scheme.shape, views(scheme, coded)
    payloads = torch.empty(len(coded), *shape.payload, dtype=dtype, device=coded.device)
    if isinstance(scheme, Float8):
        return payloads.copy_(sections["codes"].float() * _per_head(sections["scales"], shape))
    step, center = _channels(sections, shape)
    codes = _as_channels(sections["k_codes"], shape).to(torch.int32)
    payloads[:, :, 0] = ((codes + center).float() * step).reshape(len(coded), shape.layers, *shape.payload[2:])
    if shape.planes == 2:
        step = unpack(sections["v_steps"], sections["v_peaks"])[..., None]
        payloads[:, :, 1] = sections["v_codes"].float() * step
    return payloads


def _per_head(scales: Tensor, shape: BlockShape) -> Tensor:
    """Give scales ``[blocks, layers, planes, heads]`` the axes of a payload."""
    return scales[..., None, None] if shape.order == "HND" else scales[..., None, :, None]


def _as_channels(plane: Tensor, shape: BlockShape) -> Tensor:
    """View K or its codes, without its plane axis, as ``[blocks, layers, outer, tokens, channels]``."""
    outer = 1 if shape.order == "NHD" else shape.heads
    return plane.reshape(*plane.shape[:2], outer, shape.tokens, shape.heads * shape.dim // outer)


def _channels(sections: dict[str, Tensor], shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Return steps, float32, and centers, int32, ``[blocks, layers, outer, 1, channels]``."""
    outer = 1 if shape.order == "NHD" else shape.heads
    step = unpack(sections["k_steps"], sections["k_peaks"])
    center = sections["centers_high"].view(torch.int8).to(torch.int32) * 256 + sections["centers_low"]
    axes = (*step.shape[:2], outer, 1, prod(step.shape[2:]) // outer)
    return step.reshape(axes), center.reshape(axes)


def _channel_steps(keys: Tensor, fineness: float, largest: float) -> tuple[Tensor, Tensor]:
    """Return codes of steps and means of ``[blocks, layers, outer, tokens, channels]``, tokens reduced."""
    tokens = keys.shape[3]
    mean = _sum_in_order(keys) / tokens
    distance = (keys - mean[..., None, :]).abs()
    deviation = _root(_sum_in_order(distance * distance) / tokens)
    least = torch.maximum(distance.amax(3) / 126, mean.abs() / 32766)
    return _step_code(deviation * fineness, least, keys.abs().amax(3) <= largest), mean


def _row_steps(values: Tensor, fineness: float, largest: float) -> Tensor:
    reach = values.abs().amax(-1)
    square = (values * values).sum(-1) / values.shape[-1]
    return _step_code(_root(square) * fineness, reach / 127, reach <= largest)


def _step_code(wanted: Tensor, least: Tensor, fits: Tensor) -> Tensor:
    chosen = (wanted.view(torch.int32) + (1 << (LOW_BITS - 1))) >> LOW_BITS
    enough = (least.view(torch.int32) + ((1 << LOW_BITS) - 1)) >> LOW_BITS
    code = torch.maximum(chosen, enough).clamp(min=SMALLEST_CODE)
    return code.masked_fill(~fits, UNFIT_CODE).to(torch.int16)


def _sum_in_order(values: Tensor) -> Tensor:
    """Sum over tokens one after the other, as the host's codec does; torch's own sum goes by halves."""
    total = torch.zeros_like(values[..., 0, :])
    for token in values.unbind(-2):
        total += token
    return total


def _root(values: Tensor) -> Tensor:
    """Return the square root, correctly rounded; torch's own of float32 is off by a bit now and then."""
    return values.double().sqrt().float()
