"""The envelope of a shared block: the same bytes on every machine and in every version.

Run as a script, this file writes the golden envelope anew; do so only when the format gets a new version.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from tests.conformance.tier_suite import key_of
from tierkv.errors import CorruptBlock
from tierkv.storage.container import pack, unpack_into
from tierkv.storage.shared.envelope import ENVELOPE_BYTES, read_header, seal, unseal
from tierkv.storage.tier import BlockMeta

VECTOR = Path(__file__).parents[2] / "vectors" / "envelope.bin"
PAYLOAD = bytes(range(256)) * 2
META = BlockMeta(
    len(PAYLOAD), xxhash.xxh3_64_intdigest(PAYLOAD), key_of(2), key_of(3), b"tenant-1", depth=70_000, group=5
)
MARK = 0x0123456789ABCDEF


def sealed() -> bytes:
    container = bytes(pack(PAYLOAD, None, "raw", META.checksum))
    return seal(key_of(1), META, MARK, len(container)) + container


def test_writes_the_golden_bytes() -> None:
    assert sealed() == VECTOR.read_bytes()


def test_reads_the_golden_bytes() -> None:
    envelope, container = unseal(VECTOR.read_bytes(), key_of(1), b"tenant-1", key_of(3))
    assert (envelope.key, envelope.meta, envelope.mark) == (key_of(1), META, MARK)
    out = bytearray(len(PAYLOAD))
    unpack_into(container, memoryview(out))
    assert out == PAYLOAD


def test_the_golden_bytes_are_as_described() -> None:
    data = VECTOR.read_bytes()
    assert data[:8] == b"TKVE\x01\0\0\0"
    assert struct.unpack_from("<IIQQQQ", data, 8) == (
        5, 70_000, MARK, len(PAYLOAD), META.checksum, len(data) - 160
    )  # fmt: skip
    assert data[48:152] == key_of(1) + b"tenant-1" + key_of(3) + key_of(2)
    assert struct.unpack_from("<Q", data, 152)[0] == xxhash.xxh3_64_intdigest(data[:152])
    assert ENVELOPE_BYTES == 160


def test_the_header_alone_is_enough_to_know_the_block() -> None:
    assert read_header(sealed()[:ENVELOPE_BYTES], key_of(1), b"tenant-1", key_of(3)).meta == META


@pytest.mark.parametrize("at", range(ENVELOPE_BYTES))
def test_every_byte_of_the_header_counts(at: int) -> None:
    data = bytearray(sealed())
    data[at] ^= 0x10
    with pytest.raises(CorruptBlock):
        unseal(data, key_of(1), b"tenant-1", key_of(3))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 159, 160, 161, 200])
def test_a_cut_one_is_truncated_or_no_block_at_all(length: int) -> None:
    with pytest.raises(CorruptBlock) as caught:
        unseal(sealed()[:length], key_of(1), b"tenant-1", key_of(3))
    assert caught.value.cause == "truncated"


def test_another_version_is_not_read() -> None:
    head = bytearray(sealed()[:152])
    head[4] = 2
    data = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head)))
    with pytest.raises(CorruptBlock, match="version 2"):
        read_header(data, key_of(1), b"tenant-1", key_of(3))


if __name__ == "__main__":
    VECTOR.write_bytes(sealed())
