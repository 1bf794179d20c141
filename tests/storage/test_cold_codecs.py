"""The codec a block is stored with is its meta's, else the tier's; what is read decides its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.tier_suite import key_of, meta_of, read
from tierkv.errors import ConfigError
from tierkv.spec import BlockLayout
from tierkv.storage.tier import BlockMeta, checksum

from .cold_store import OpenCold, opener

LAYOUT = BlockLayout("float32", (2, 2, 16, 2, 32), 2)


@pytest.fixture
def open_cold(tmp_path: Path) -> Iterator[OpenCold]:
    yield from opener(tmp_path / "cold")


def kv(number: int) -> tuple[bytes, BlockMeta]:
    payload = np.random.default_rng(number).standard_normal(LAYOUT.shape, np.float32).tobytes()
    return payload, meta_of(payload)._replace(layout=LAYOUT)


@pytest.mark.parametrize("threads", [1, 3])
def test_codecs_of_one_batch_are_each_blocks_own(open_cold: OpenCold, threads: int) -> None:
    tier = open_cold(encode_threads=threads)
    blocks = [kv(number) for number in range(4)]
    items = [
        (key_of(number), payload, meta._replace(codec=codec))
        for number, ((payload, meta), codec) in enumerate(zip(blocks, ("", "eq3", "bx1", "eq3"), strict=True))
    ]
    assert tier.put_many(items) == [None] * 4
    seen = [read(tier, key_of(number)) for number in range(4)]
    assert [found == payload for found, (payload, _) in zip(seen, blocks, strict=True)] == [True, False, True, False]
    tier.close()
    tier = open_cold()
    for number, found in enumerate(seen):
        meta = tier.meta(key_of(number))
        assert meta is not None
        assert found is not None
        assert meta.checksum == checksum(found)
        assert read(tier, key_of(number)) == found
    assert dict(tier.damage) == {}


def test_a_present_block_is_not_coded_again(open_cold: OpenCold) -> None:
    tier = open_cold()
    payload, meta = kv(0)
    tier.put(key_of(0), payload, meta._replace(codec="eq5"))
    found = read(tier, key_of(0))
    tier.put(key_of(0), payload, meta)
    assert read(tier, key_of(0)) == found != payload


def test_an_unknown_codec_costs_its_block_only(open_cold: OpenCold) -> None:
    tier = open_cold()
    (first, meta), (second, other) = kv(0), kv(1)
    outcomes = tier.put_many([(key_of(0), first, meta._replace(codec="zip")), (key_of(1), second, other)])
    assert isinstance(outcomes[0], ConfigError)
    assert outcomes[1] is None
    assert tier.meta(key_of(0)) is None
    assert read(tier, key_of(1)) == second
