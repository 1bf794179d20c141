"""Samples of chains: whole prefixes, in proportion, and the same for all who share them."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces import block_key
from tierkv.errors import ConfigError
from tierkv.insight.spans import WIDEST, SpanSampler

widths = st.integers(0, 8).map(lambda power: 2**power)


def chain(start: int, blocks: int) -> list[bytes]:
    return [block_key(start + depth) for depth in range(blocks)]


@given(widths, widths, st.integers(0, 5000), st.integers(0, 700), st.integers(0, 31))
def test_each_span_has_one_block_that_stands_for_it(a: int, b: int, start: int, blocks: int, byte: int) -> None:
    narrowest, widest = sorted((a, b))
    picked = SpanSampler(narrowest, widest, byte=byte).sample(chain(start, blocks))
    begin, width = 0, narrowest
    for depth, stands_for in picked:
        assert stands_for == width
        assert begin <= depth < begin + width
        begin, width = begin + width, min(2 * width, widest)
    assert all(depth < blocks for depth, _ in picked)
    assert blocks < begin + width  # at most the last span, which the chain does not fill, has none


@given(st.integers(0, 5000), st.integers(0, 300), st.integers(0, 300))
def test_chains_that_share_a_prefix_share_its_sample(start: int, shared: int, blocks: int) -> None:
    sampler = SpanSampler(1, 32)
    prefix = chain(start, shared)
    other = prefix + chain(900_000, blocks)
    of_prefix = sampler.sample(prefix)
    assert sampler.sample(other)[: len(of_prefix)] == of_prefix


@pytest.mark.parametrize("blocks", [1, 10, 50, 333])
def test_samples_stand_for_as_many_blocks_as_there_are_on_average(blocks: int) -> None:
    sampler = SpanSampler(4, 64)
    sums = [sum(width for _, width in sampler.sample(chain(1000 * number, blocks))) for number in range(3000)]
    assert fmean(sums) == pytest.approx(blocks, rel=0.08)


def test_bytes_of_the_keys_give_independent_samples() -> None:
    keys = chain(0, 10_000)
    samples = [set(SpanSampler(16, 16, byte=byte).sample(keys)) for byte in range(8)]
    agreeing = [len(a & b) / len(a) for number, a in enumerate(samples) for b in samples[:number]]
    assert fmean(agreeing) == pytest.approx(1 / 16, abs=0.02)


@pytest.mark.parametrize(("narrowest", "widest"), [(0, 8), (3, 8), (1, 12), (16, 8), (1, 2 * WIDEST)])
def test_other_widths_are_refused(narrowest: int, widest: int) -> None:
    with pytest.raises(ConfigError):
        SpanSampler(narrowest, widest)
