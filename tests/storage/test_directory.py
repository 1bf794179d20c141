"""The arena's directory: listed blocks are found, and nothing else ever is."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.directory import ENTRY_BYTES, DirectoryReader, DirectoryWriter, Place, directory_bytes

SIZE = directory_bytes(1 << 20)


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=32).digest()


def place_of(number: int) -> Place:
    return Place(number * 4096, number + 1, number * 0x9E3779B97F4A7C15 % 2**64)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400))
def test_it_finds_what_is_listed(steps: list[tuple[bool, int]]) -> None:
    memory = memoryview(bytearray(SIZE))
    writer, reader = DirectoryWriter(memory), DirectoryReader(memory)
    listed: set[int] = set()
    for insert, number in steps:
        if insert and number not in listed:
            if writer.insert(key_of(number), place_of(number)):
                listed.add(number)
        elif not insert:
            writer.remove(key_of(number))
            listed.discard(number)
    for number in range(301):
        assert reader.find(key_of(number)) == (place_of(number) if number in listed else None)


def test_a_full_bucket_refuses_and_keeps_what_it_has() -> None:
    memory = memoryview(bytearray(SIZE))
    writer, reader = DirectoryWriter(memory), DirectoryReader(memory)
    keys = [bytes(8) + key_of(number)[8:] for number in range(9)]
    assert [writer.insert(key, place_of(number)) for number, key in enumerate(keys)] == [True] * 8 + [False]
    assert [reader.find(key) for key in keys] == [place_of(number) for number in range(8)] + [None]
    writer.remove(keys[3])
    assert writer.insert(keys[8], place_of(8))
    assert reader.find(keys[8]) == place_of(8)


def test_an_emptied_directory_is_all_zeros() -> None:
    memory = memoryview(bytearray(SIZE))
    writer = DirectoryWriter(memory)
    for number in range(50):
        writer.insert(key_of(number), place_of(number))
    for number in range(50):
        writer.remove(key_of(number))
    assert not any(memory)


@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_an_entry_with_any_wrong_byte_is_not_found(byte: int) -> None:
    memory = memoryview(bytearray(SIZE))
    DirectoryWriter(memory).insert(key_of(1), place_of(1))
    (at,) = [at for at in range(0, SIZE, ENTRY_BYTES) if memory[at + 8 : at + 40] == key_of(1)]
    memory[at + byte] ^= 0x10
    assert DirectoryReader(memory).find(key_of(1)) is None


@given(st.integers(0, ENTRY_BYTES), st.integers(0, ENTRY_BYTES))
def test_a_mixture_of_two_entries_is_not_found(start: int, stop: int) -> None:
    """Whatever part of an entry a reader sees of before and after, it finds the old, the new, or nothing."""
    old, new = memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE))
    first, second = bytes(8) + key_of(1)[8:], bytes(8) + key_of(2)[8:]
    DirectoryWriter(old).insert(first, place_of(1))
    DirectoryWriter(new).insert(second, place_of(2))
    mixed = memoryview(bytearray(old))
    mixed[start:stop] = new[start:stop]
    reader = DirectoryReader(mixed)
    assert reader.find(first) in (None, place_of(1))
    assert reader.find(second) in (None, place_of(2))
