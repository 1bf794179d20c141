"""From leased blocks to cache objects, and from several cache objects to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from tierkv.cache import ReadLease
from tierkv.engines.transformers.layers import RoomyLayer, RoomySlidingLayer, kv_dtype, new_cache
from tierkv.errors import InvalidRequest, SpecMismatch
from tierkv.spec import KVSpec

__all__ = ["JoinedRows", "join_rows", "load_prefix"]


def load_prefix(model: PreTrainedModel, spec: KVSpec, lease: ReadLease, *, room: int = 0) -> tuple[DynamicCache, int]:
    """Copy the blocks of a read lease into a new cache object on the model's device.

    Parameters
    ----------
    room
        Tokens that will be appended: memory for them is allocated now, so that nothing is copied again then.

    Returns
    -------
    cache, tokens
        The cache object owns its memory: the lease may end now. `tokens` is ``lease.hit_tokens``. Blocks of a
        sliding-window group that lie before its window may be absent from the lease; they are zeros that the model
        does not look at.

    Raises
    ------
    CorruptBlock
        A block failed verification and has been removed; acquire again for what is left of the prefix.
    LeaseLost
        The lease ended meanwhile.
    SpecMismatch
        A layer of the model looks at a block that the spec lets be absent.
    """
    tokens = lease.hit_blocks * spec.block_tokens
    past = new_cache(model)
    for number, group in enumerate(spec.groups):
        held = {ref.index for ref in lease.blocks if ref.group == number}
        first = lease.hit_blocks
        while first - 1 in held:
            first -= 1
        kv = _read_group(spec, number, lease, range(first, lease.hit_blocks), tokens + room)
        absent = first * spec.block_tokens
        for row, index in enumerate(group.layers):
            layer = past.layers[index]
            if not isinstance(layer, RoomyLayer) or layer.first_seen(tokens) < absent:
                raise SpecMismatch(
                    f"layer {index} of {spec.model} looks at tokens before {absent}, which its KV group need not keep",
                    remedy="make the spec with spec_for from the model that runs",
                )
            keys, values = (_on_device(plane, model.device, tokens) for plane in kv[row])
            layer.fill(keys, values, tokens)
            if isinstance(layer, RoomySlidingLayer):
                layer.absent = absent
    return past, tokens


def _read_group(spec: KVSpec, number: int, lease: ReadLease, held: range, capacity: int) -> torch.Tensor:
    """Return blocks in their places: ``(layers, 2, 1, heads, capacity, head_dim)`` on the CPU, zeros before them."""
    layout, size = spec.layout(number), spec.block_tokens
    layers, planes, heads, _, width = layout.shape
    dtype = kv_dtype(spec)
    bits = np.dtype(f"i{dtype.itemsize}")  # numpy has no bfloat16, and copies need none
    # numpy, not torch: it asks for huge pages, and faulting in 4 KiB pages costs more than the copy itself. Zeros are
    # for blocks that are absent: never touched, they are never faulted in.
    allocate = np.zeros if held.start else np.empty
    kv = allocate((layers, planes, heads, capacity, width), bits)
    for index in held:
        block = np.frombuffer(lease.view(index, number), bits).reshape(layout.shape)
        np.copyto(kv[:, :, :, index * size : (index + 1) * size], block)
    return torch.from_numpy(kv).view(dtype).unsqueeze(2)


def _on_device(plane: torch.Tensor, device: torch.device, tokens: int) -> torch.Tensor:
    if device.type == "cpu":
        return plane
    moved = torch.empty(plane.shape, dtype=plane.dtype, device=device)
    moved[:, :, :tokens] = plane[:, :, :tokens].to(device)
    return moved


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Several prompts in one cache object, padded on the left to the longest.

    Attributes
    ----------
    cache
        The cache object; owns its memory.
    padding
        Per row, how many tokens of padding go before its prompt.
    mask
        ``(rows, tokens + room)``: 0 for padding, 1 elsewhere. A forward pass takes the columns up to its last token.
    """

    cache: DynamicCache
    padding: tuple[int, ...]
    mask: torch.Tensor

    def positions(self, total: int) -> torch.Tensor:
        """Return ``(rows, 1)``: each row's position of the token in column `total`."""
        return total - torch.tensor(self.padding, device=self.mask.device).unsqueeze(1)


def join_rows(model: PreTrainedModel, pasts: Sequence[DynamicCache], *, room: int = 0) -> JoinedRows:
    """Copy cache objects of one row each, made by `new_cache` or `load_prefix`, into one with a row for each.

    `room`: tokens that will be appended. The order of the rows is that of `pasts`. Raises `InvalidRequest` for layers
    that are not of this adapter's making.
    """
    lengths = [past.get_seq_length() for past in pasts]
    longest = max(lengths)
    padding = tuple(longest - length for length in lengths)
    joined = new_cache(model)
    for index, target in enumerate(joined.layers):
        if not isinstance(target, RoomyLayer):
            continue
        rows = [past.layers[index] for past in pasts]
        planes = []
        for name in ("keys", "values"):
            parts: list[torch.Tensor] = [getattr(row, name) for row in rows]
            _, heads, _, width = parts[0].shape
            plane = parts[0].new_zeros((len(rows), heads, longest + room, width))
            for number, part in enumerate(parts):
                if part.shape[-2] != lengths[number]:
                    raise InvalidRequest("a cache object has dropped tokens", remedy="make it with new_cache")
                plane[number, :, padding[number] : longest] = part[0]
            planes.append(plane)
        target.fill(planes[0], planes[1], longest)
        if isinstance(target, RoomySlidingLayer):
            absent = [(getattr(row, "absent", 0), pad) for row, pad in zip(rows, padding, strict=True)]
            target.absent = max(count + pad if count else 0 for count, pad in absent)
    mask = torch.ones((len(pasts), longest + room), dtype=torch.long, device=model.device)
    for number, pad in enumerate(padding):
        mask[number, :pad] = 0
    return JoinedRows(joined, padding, mask)
