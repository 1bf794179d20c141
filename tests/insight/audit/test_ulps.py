"""Distances between floating-point numbers: every pair of 16-bit numbers, and float32 by its own neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.insight.audit.ulps import EPSILON, as_numbers, ulp_distance, ulp_histogram

HALVES = ("float16", "bfloat16")
ALL = np.arange(1 << 16, dtype=np.uint16)
words = st.integers(0, (1 << 32) - 1)


def one(left: int, right: int, dtype: str, width: Any = np.uint32) -> int:
    return int(ulp_distance(np.array([left], width), np.array([right], width), dtype)[0])


def number(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


@pytest.fixture(scope="module", params=HALVES)
def table(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A dtype, and the place of each of its numbers among all of them in ascending order; NaNs have none."""
    numbers = as_numbers(ALL, request.param)
    values = np.unique(numbers[~np.isnan(numbers)])  # +0 and -0 are one
    places = np.full(ALL.size, -1)
    places[~np.isnan(numbers)] = np.searchsorted(values, numbers[~np.isnan(numbers)])
    return request.param, places


@pytest.mark.parametrize("other", [0x0000, 0x8000, 0x0001, 0x3C01, 0xBF80, 0x7BFF, 0x7C00, 0x7F80, 0xFF80, 0xFBFF])
def test_a_half_is_as_far_from_all_others_as_there_are_numbers_between(table: tuple[str, Any], other: int) -> None:
    dtype, places = table
    distances = ulp_distance(ALL, np.full_like(ALL, other), dtype)
    real = places >= 0
    if real[other]:
        assert np.array_equal(distances[real], np.abs(places[real] - places[other]))
        assert (distances[~real] == 1 << 16).all()
    else:
        assert (distances[real] == 1 << 16).all()
        assert not distances[~real].any()


@given(words, st.integers(0, 300), st.booleans())
def test_steps_to_the_next_float32_are_counted(bits: int, steps: int, upwards: bool) -> None:
    start = np.float32(number(bits))
    if math.isnan(start):
        return
    end, towards = start, np.float32(math.inf if upwards else -math.inf)
    taken = 0
    while taken < steps and end != towards:
        end, taken = np.nextafter(end, towards), taken + 1
    assert one(int(start.view(np.uint32)), int(end.view(np.uint32)), "float32") == taken


@given(words, words, words)
def test_it_is_a_distance(a: int, b: int, c: int) -> None:
    ab, ba, bc, ac = (one(*pair, "float32") for pair in ((a, b), (b, a), (b, c), (a, c)))
    assert ab == ba >= 0
    if not any(math.isnan(number(bits)) for bits in (a, b, c)):
        assert ac <= ab + bc
        assert (ab == 0) == (number(a) == number(b))


@given(words, words)
def test_nan_is_farther_than_any_number(a: int, b: int) -> None:
    nan = 0x7FC00000
    expected = 0 if math.isnan(number(a)) else 1 << 32
    assert one(a, nan, "float32") == one(nan | 0x80000001, a, "float32") == expected
    if not math.isnan(number(a)) and not math.isnan(number(b)):
        assert one(a, b, "float32") < 1 << 32


@pytest.mark.parametrize("dtype", EPSILON)
def test_zeros_are_equal_and_infinity_follows_the_largest(dtype: str) -> None:
    width = np.uint32 if dtype == "float32" else np.uint16
    sign = 1 << (np.dtype(width).itemsize * 8 - 1)
    infinity = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    assert one(0, sign, dtype, width) == 0
    assert one(1, sign | 1, dtype, width) == 2
    assert one(infinity, infinity - 1, dtype, width) == 1
    assert one(infinity, infinity | sign, dtype, width) == 2 * infinity
    assert as_numbers(np.array([infinity], width), dtype)[0] == math.inf


@pytest.mark.parametrize("dtype", EPSILON)
def test_epsilon_is_one_step_from_one(dtype: str) -> None:
    width = np.uint32 if dtype == "float32" else np.uint16
    (one_bits,) = {
        "float32": np.array([1], np.float32).view(np.uint32),
        "float16": np.array([1], np.float16).view(np.uint16),
        "bfloat16": np.array([0x3F80], np.uint16),
    }[dtype]
    after = as_numbers(np.array([one_bits + 1], width), dtype)[0]
    assert float(after) - 1.0 == EPSILON[dtype]


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1 << 32)), min_size=1))
def test_the_histogram_counts_by_powers_of_two(distances: list[int]) -> None:
    histogram = ulp_histogram(np.array(distances, np.int64))
    assert sum(histogram) == len(distances)
    for size, count in enumerate(histogram):
        assert count == sum(distance.bit_length() == size for distance in distances)
