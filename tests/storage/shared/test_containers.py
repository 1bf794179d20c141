"""Containers in parts, and verified without being decoded: what goes between tiers is what `pack` makes."""

from __future__ import annotations

import pytest

from tests.storage.shared.test_tier import LAYOUT, kv
from tierkv.errors import CorruptBlock
from tierkv.storage.codecs import CODECS
from tierkv.storage.container import pack, pack_parts, peek, verify_sections
from tierkv.storage.tier import checksum


@pytest.mark.parametrize("codec", [codec.name for codec in CODECS])
@pytest.mark.parametrize("layout", [LAYOUT, None])
def test_the_parts_make_the_container(codec: str, layout: object) -> None:
    payload = kv(1)
    packed = bytes(pack(payload, layout, codec, checksum(payload)))  # type: ignore[arg-type]
    parts = pack_parts(payload, layout, codec, checksum(payload))  # type: ignore[arg-type]
    assert peek(parts[0]) == peek(packed)
    assert b"".join(parts) == packed


@pytest.mark.parametrize("codec", ["raw", "bx1", "eq3"])
def test_every_byte_and_the_length_are_verified(codec: str) -> None:
    payload = kv(2)
    packed = bytes(pack(payload, LAYOUT, codec, checksum(payload)))
    assert verify_sections(packed) == peek(packed)
    for at in [*range(100), *range(100, len(packed), 97), len(packed) - 1]:
        with pytest.raises(CorruptBlock):
            verify_sections(packed[:at] + bytes([packed[at] ^ 4]) + packed[at + 1 :])
    for wrong in (packed[:-1], packed + b"\0", packed[:10]):
        with pytest.raises(CorruptBlock):
            verify_sections(wrong)
