"""Codec ``raw``: one section, the payload as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.spec import BlockLayout
from tierkv.storage.codecs.base import Buffer, Bytes, Codec, as_bytes, malformed

__all__ = ["Raw"]


class Raw(Codec):
    """Keeps bytes as they are, at memcpy speed."""

    name = "raw"
    id = 0

    def encode(self, payload: Buffer, layout: BlockLayout) -> list[Bytes]:
        return [as_bytes(payload)]

    def decode_into(self, sections: Sequence[memoryview], out: memoryview, layout: BlockLayout) -> None:
        if len(sections) != 1 or len(sections[0]) != len(out):
            raise malformed(self, f"{len(sections)} sections for {len(out)} bytes")
        np.copyto(as_bytes(out), as_bytes(sections[0]))
