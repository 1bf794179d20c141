"""Steps as coded blocks hold them: plain torch on whatever device the block is, for kernels and reference alike.

There is one step per channel of K, and per token and head of V: too few for their cost to matter. They come as codes,
the upper 12 bits of a float32, and are stored as distances from the largest of their layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LARGEST_CODE", "LOW_BITS", "SMALLEST_CODE", "UNFIT_CODE", "limit", "store_channels", "store_rows", "unpack"]

LOW_BITS = 20
SMALLEST_CODE = (127 - 100) << 3  # 2**-100
LARGEST_CODE = (127 + 41) << 3
UNFIT_CODE = 0x7FFF
"""Of the step of a channel or row in which a magnitude is beyond the limit."""


def limit(dtype: torch.dtype) -> float:
    """Return the largest magnitude that is coded; restored ones are off by at most as much."""
    return 2.0**15 if dtype == torch.float16 else 2.0**40


def store_channels(sections: Mapping[str, Tensor], chosen: Tensor, means: Tensor) -> Tensor:
    """Store steps and centers of K; return which blocks could be coded, bool ``[blocks]``.

    `chosen`, int16, and `means`, float32, are ``[blocks, layers, heads, dim]``.
    """
    fits = _store(sections["k_steps"], sections["k_peaks"], chosen)
    # a product with the inverse, as the host has it: a quotient would round otherwise
    inverse = 1 / unpack(sections["k_steps"], sections["k_peaks"])
    centers = torch.round(means * inverse).nan_to_num().clamp(-(2**15), 2**15 - 1).to(torch.int32)
    sections["centers_low"].copy_(centers & 0xFF)
    sections["centers_high"].copy_(centers >> 8 & 0xFF)
    return fits


def store_rows(sections: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
    """As `store_channels`, for V and `chosen` ``[blocks, layers, tokens, heads]`` in the order of the payload."""
    return _store(sections["v_steps"], sections["v_peaks"], chosen)


def unpack(steps: Tensor, peaks: Tensor) -> Tensor:
    """Return steps, float32."""
    codes = peaks.to(torch.int32)[:, :, None, None] - steps.to(torch.int32)
    return (codes << LOW_BITS).view(torch.float32)


def _store(steps: Tensor, peaks: Tensor, chosen: Tensor) -> Tensor:
    codes = chosen.to(torch.int32)
    top = codes.flatten(2).amax(2)
    peaks.copy_(top)
    steps.copy_((top[:, :, None, None] - codes).clamp(max=255))
    return (top <= LARGEST_CODE).all(1)
