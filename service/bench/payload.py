"""Payloads that look like KV: channels of very different scale, values close to normal within a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tierkv.spec import BlockLayout
from tierkv.storage.tier import BlockMeta, checksum

__all__ = ["Blocks", "fresh_key", "kv_like"]

_HEADS, _HEAD_DIM, _TOKENS = 2, 64, 64
_LAYER_BYTES = 2 * _TOKENS * _HEADS * _HEAD_DIM * 2
_DISTINCT_BYTES = 8 << 20
_fresh = count()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Payloads of one layout.

    Attributes
    ----------
    layout
        Shape of each block.
    data
        ``[blocks, bytes]``, uint8.
    metas
        Of each block: length, checksum, layout.
    """

    layout: BlockLayout
    data: NDArray[np.uint8]
    metas: Sequence[BlockMeta]

    @classmethod
    def make(cls, block_bytes: int, number: int) -> Blocks:
        """Make `number` bfloat16 blocks of `block_bytes`, a multiple of 32 KiB; after some megabytes they repeat."""
        layout = BlockLayout("bfloat16", (block_bytes // _LAYER_BYTES, 2, _TOKENS, _HEADS, _HEAD_DIM), 2)
        distinct = kv_like(layout.shape, min(number, max(1, _DISTINCT_BYTES // block_bytes)))
        data = np.resize(distinct.view(np.uint8).reshape(-1), (number, block_bytes))
        return cls(layout, data, [BlockMeta(block_bytes, checksum(row.data), layout=layout) for row in data])

    def first(self, nbytes: int) -> Blocks:
        """Return as many of the blocks as `nbytes` hold."""
        number = nbytes // self.layout.nbytes
        return Blocks(self.layout, self.data[:number], self.metas[:number])

    def items(self, keys: Sequence[bytes], start: int = 0) -> list[tuple[bytes, memoryview, BlockMeta]]:
        """Return what `Tier.put_many` takes: blocks from `start` on under `keys`."""
        rows = range(start, start + len(keys))
        return [(key, self.data[row].data, self.metas[row]) for key, row in zip(keys, rows, strict=True)]


def fresh_key() -> bytes:
    """Return a block key that was not returned before."""
    return blake2b(next(_fresh).to_bytes(8, "little"), digest_size=32).digest()


def kv_like(shape: tuple[int, ...], blocks: int, seed: int = 0) -> NDArray[np.uint16]:
    """Return bfloat16 bits ``[blocks, *shape]``, shape NHD as in `BlockLayout`. Real KV codes a little differently."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((blocks, *shape), dtype=np.float32)
    values *= np.exp(generator.standard_normal((*shape[:2], 1, *shape[3:]), dtype=np.float32))
    bits = values.view(np.uint32)
    bits >>= 16
    return bits.astype(np.uint16)
