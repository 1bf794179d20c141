"""The contract of a codec: how the bytes of one block become sections, and how sections become the block again.

A codec knows a block's layout and nothing else. It neither checks sums nor writes headers: the container around it
does, and hands a codec only sections that have passed verification. Codecs are safe to call from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import CorruptBlock
from tierkv.spec import BlockLayout

__all__ = ["Buffer", "Bytes", "Codec", "Unsuitable", "as_bytes", "malformed"]

Buffer = bytes | bytearray | memoryview
Bytes = NDArray[np.uint8]


class Unsuitable(Exception):
    """A lossy codec declines a block; a lossless one must store it. Never leaves the container module."""


class Codec(ABC):
    """One way to store a block.

    Attributes
    ----------
    name
        What configuration calls it.
    id
        What a container calls it, 0..255. An id never changes its meaning.
    lossy
        Whether decoding gives other bytes than were encoded: always the same ones, close to the original.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    lossy: ClassVar[bool] = False

    @abstractmethod
    def encode(self, payload: Buffer, layout: BlockLayout) -> list[Bytes]:
        """Code a payload of exactly `layout.nbytes` C-contiguous bytes into at most 255 sections. Blocks.

        The sections may be views of `payload` or of memory that this thread's next call into the codec reuses: copy
        them before. A payload that changes meanwhile gives sections of undefined content, never another error than
        `Unsuitable`, which only lossy codecs raise: for blocks they would not do justice to.
        """

    @abstractmethod
    def decode_into(self, sections: Sequence[memoryview], out: memoryview, layout: BlockLayout) -> None:
        """Fill `out`, exactly `layout.nbytes` writable bytes of any alignment, with the payload. Blocks.

        Raises `CorruptBlock` with cause ``codec`` when the sections cannot have come from `encode`; `out` then holds
        garbage. Sections may be read-only and are not changed.
        """


def as_bytes(buffer: Buffer) -> Bytes:
    """View a C-contiguous buffer as an array of bytes, writable if the buffer is."""
    return np.frombuffer(buffer, np.uint8)


def malformed(codec: Codec, what: str) -> CorruptBlock:
    """Return the error for sections that `codec` could not have written."""
    return CorruptBlock(
        f"sections are not what codec {codec.name!r} writes: {what}",
        cause="codec",
        remedy="drop the block; the next store repairs it",
    )
