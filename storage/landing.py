"""Sums of blocks on a GPU, taken there: what was copied is verified where it has landed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from tierkv.storage.device import DeviceBlock

__all__ = ["Sums", "device_sums"]

Sums = Callable[[Sequence[DeviceBlock]], Sequence[int | None]]
"""XXH3-64 of each block, None for one that cannot be summed."""


def device_sums() -> Sums | None:
    """Return what sums blocks on a GPU, None without the packages for it. Loads nothing yet."""
    return _sums if all(find_spec(name) is not None for name in ("torch", "triton")) else None


def _sums(blocks: Sequence[DeviceBlock]) -> Sequence[int | None]:
    import torch

    from tierkv.kernels.checksum import MIN_BYTES, checksums

    found: list[int | None] = [None] * len(blocks)
    for nbytes in {block.nbytes for block in blocks if block.nbytes >= MIN_BYTES}:
        places = [place for place, block in enumerate(blocks) if block.nbytes == nbytes]
        sums = checksums([torch.as_tensor(blocks[place], device=blocks[place].device) for place in places])
        for place, signed in zip(places, sums.tolist(), strict=True):
            found[place] = signed % 2**64
    return found
