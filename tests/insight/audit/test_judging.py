"""Comparing and judging, on numbers made for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tierkv.insight.audit.comparing import Comparison, absolute_difference, divergence
from tierkv.insight.audit.judging import Compared, Judgement, judge, same
from tierkv.insight.audit.result import Plane

BLOCK = 4
NOISE = 1e-5
shapes = st.tuples(st.integers(1, 2), st.integers(1, 11), st.integers(1, 3))


@st.composite
def planes(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two planes of any float32 bits, of which most agree."""
    shape = draw(shapes)
    computed = draw(arrays.arrays(np.uint32, shape))
    mask = draw(arrays.arrays(np.bool_, shape, elements=st.booleans()))
    return np.where(mask, draw(arrays.arrays(np.uint32, shape)), computed), computed


def off(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    return abs(left - right) if math.isfinite(left) and math.isfinite(right) else math.inf


@settings(max_examples=100)
@given(planes())
def test_a_comparison_is_what_a_loop_would_find(pair: tuple[Any, Any]) -> None:
    served, computed = pair
    found = Comparison.of(served, computed, "float32", first=8, block_tokens=BLOCK)
    left, right = served.view(np.float32), computed.view(np.float32)
    heads, tokens, width = served.shape
    for token in range(tokens):
        places = [(head, token, dim) for head in range(heads) for dim in range(width)]
        assert found.differing[token] == sum(served[place] != computed[place] for place in places)
        assert found.off[token] == max(off(float(left[place]), float(right[place])) for place in places)
    assert found.block_errors.size == -(-tokens // BLOCK)
    assert not np.isnan(found.block_errors).any()
    assert sum(found.ulps) == served.size
    for block in range(found.block_errors.size):
        part = np.s_[:, block * BLOCK : (block + 1) * BLOCK]
        if np.isfinite(left[part]).all() and np.isfinite(right[part]).all() and right[part].any():
            wide = [side[part].astype(np.float64) for side in (left, right)]
            norm = np.linalg.norm(wide[1])
            if 1e-150 < norm < 1e150:
                assert found.block_errors[block] == pytest.approx(np.linalg.norm(wide[0] - wide[1]) / norm)


def test_infinities_and_nans_differ_from_numbers_only() -> None:
    left = np.array([math.inf, math.inf, math.nan, math.nan, -math.inf, 1.0])
    right = np.array([math.inf, 1.0, math.nan, 1.0, math.inf, 1.5])
    assert absolute_difference(left, right).tolist() == [0, math.inf, 0, math.inf, math.inf, 0.5]


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(-5, 5))
def test_divergence_knows_only_distributions(logits: list[float], shift: float) -> None:
    assert divergence([value + shift for value in logits], logits) == pytest.approx(0, abs=1e-9)
    assert divergence(logits, list(reversed(logits))) >= 0


def test_divergence_of_a_coin() -> None:
    assert divergence([math.log(0.25), math.log(0.75)], [0.0, 0.0]) == pytest.approx(
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    )
    assert divergence([math.nan, 0.0], [0.0, 0.0]) == math.inf


class Case:
    """A layer's V of four blocks and some logits, computed twice with a little noise, and served."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.computed = self.random.standard_normal((2, 16, 8)).astype(np.float32)
        self.other = self.noisy(self.computed)
        self.served = self.noisy(self.computed)
        self.logits = [self.noisy(np.array([3.0, 2.9, 0.0, -1.0], np.float32)) for _ in range(3)]

    def noisy(self, values: Any) -> Any:
        return (values + self.random.uniform(-NOISE, NOISE, values.shape)).astype(np.float32)

    def judge(self, *, exact: bool = False, lossy: str = "") -> Judgement:
        def compared(values: Any) -> Comparison:
            bits = [np.ascontiguousarray(side).view(np.uint32) for side in (values, self.computed)]
            return Comparison.of(bits[0], bits[1], "float32", first=8, block_tokens=BLOCK)

        part = Compared(5, "V", compared(self.served), None if exact else compared(self.other))
        served, computed, other = self.logits
        return judge(
            [part], (served, computed, None if exact else other), dtype="float32", lossy=lossy, block_tokens=BLOCK
        )


def test_noise_is_ok_in_an_envelope_and_not_where_bits_must_agree() -> None:
    case = Case()
    assert (case.judge().verdict, case.judge().basis) == ("ok", "envelope")
    found = case.judge(exact=True)
    assert (found.verdict, found.basis, found.reason) == ("corrupt", "exact", "bits")
    assert found.spot is not None
    assert found.spot.token == 8


def test_drift_of_all_values_is_outside_and_one_value_is_corrupt() -> None:
    drifted, flipped = Case(), Case()
    drifted.served = drifted.computed * np.float32(1.001)
    flipped.served[1, 6, 2] += 1.0
    assert (drifted.judge().verdict, drifted.judge().reason) == ("outside", "difference")
    found = flipped.judge()
    assert (found.verdict, found.reason) == ("corrupt", "difference")
    assert found.spot is not None
    assert (found.spot.layer, found.spot.plane, found.spot.token, found.spot.positions) == (5, "V", 8 + 6, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_corrupt(value: float) -> None:
    case = Case()
    case.served[0, 3, 0] = value
    for lossy in ("", "eq2"):
        assert case.judge(lossy=lossy).verdict == "corrupt"


def test_a_budget_allows_what_its_level_costs() -> None:
    case = Case()
    case.served = case.computed * np.float32(1.03)
    assert case.judge().verdict == "outside"
    assert case.judge(lossy="eq2").verdict == "ok"
    assert case.judge(lossy="int8").reason == "relative-error"
    assert case.judge(lossy="int8").verdict == "outside"
    case.served = -case.computed
    assert case.judge(lossy="eq5").verdict == "corrupt"


def test_logits_have_a_say_where_kv_is_right() -> None:
    case = Case()
    case.logits[0] = np.array([2.9, 3.0, 0.0, -1.0], np.float32)
    found = case.judge()
    assert (found.verdict, found.reason) == ("outside", "token")
    assert not found.logits.near_tie
    case.logits[0] = np.array([3.0, 2.9, 0.5, -1.0], np.float32)
    assert case.judge().reason == "logits"
    assert case.judge(lossy="eq3").verdict == "ok"
    case.logits[0] = np.array([-9.0, 2.9, 3.0, -1.0], np.float32)
    assert case.judge(lossy="eq3").reason == "kl"


def test_what_is_named_is_the_first_token_then_the_first_layer() -> None:
    bits = np.zeros((1, 8, 2), np.uint32)

    def damaged(layer: int, plane: Plane, token: int) -> Compared:
        served = bits.copy()
        served[0, token:, 1] = 1
        return Compared(layer, plane, Comparison.of(served, bits, "float32", first=0, block_tokens=BLOCK), None)

    logits = np.zeros(3, np.float32)
    parts = [damaged(0, "K", 6), damaged(1, "K", 3), damaged(1, "V", 3), damaged(2, "K", 3)]
    found = judge(parts, (logits, logits, None), dtype="float32", lossy="", block_tokens=BLOCK).spot
    assert found is not None
    assert (found.layer, found.plane, found.token, found.positions) == (1, "K", 3, 5)


def test_a_near_tie_may_tip() -> None:
    case = Case()
    tie = np.array([3.0, 3.0 + 0.3 * NOISE, 0.0, -1.0], np.float32)
    case.logits = [tie[[1, 0, 2, 3]], tie, case.noisy(tie)]
    found = case.judge()
    assert (found.verdict, found.logits.same_token, found.logits.near_tie) == ("ok", False, True)


def test_two_equal_computations_do_not_mean_that_nothing_may_differ() -> None:
    case = Case()
    case.other = case.computed
    case.served = case.computed.copy()
    case.served[0, 0, 0] = np.nextafter(case.served[0, 0, 0], np.float32(9))
    case.logits = [case.logits[1]] * 3
    assert case.judge().verdict == "ok"


def test_the_same_is_the_same_to_the_bit() -> None:
    bits = np.zeros((1, 4, 2), np.uint32)
    zero = Compared(0, "K", Comparison.of(bits, bits, "float32", first=0, block_tokens=4), None)
    signed = Compared(0, "K", Comparison.of(bits, bits | (1 << 31), "float32", first=0, block_tokens=4), None)
    logits = np.zeros(3, np.float32)
    assert same([zero], logits, logits)
    assert not same([zero, signed], logits, logits)
    assert not same([zero], -logits, logits)
