"""Which hits are audited: the share that was asked for, at no turns that anybody could foresee."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidRequest
from tierkv.insight.audit import Sampler

MANY = 20_000


def turns(share: float, seed: bytes | None, count: int = MANY) -> list[int]:
    sampler = Sampler(share, seed=seed)
    return [turn for turn in range(count) if sampler.take()]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_the_share_is_met(share: float) -> None:
    taken = turns(share, b"seed")
    assert abs(len(taken) / MANY - share) < 4 * (share * (1 - share) / MANY) ** 0.5


def test_nothing_and_everything() -> None:
    assert not turns(0.0, b"seed")
    assert len(turns(1.0, b"seed")) == MANY


@given(st.binary(), st.binary())
def test_a_seed_fixes_the_turns_and_another_changes_them(one: bytes, two: bytes) -> None:
    assert turns(0.5, one, 100) == turns(0.5, one, 100)
    assert (turns(0.5, one, 100) == turns(0.5, two, 100)) == (one == two)


def test_without_a_seed_nobody_knows_the_turns() -> None:
    assert turns(0.5, None, 200) != turns(0.5, None, 200)


def test_turns_have_no_rhythm() -> None:
    taken = turns(0.05, b"seed")
    gaps = [later - earlier for earlier, later in pairwise(taken)]
    assert len(set(gaps)) > 50
    assert all(any(turn % period == rest for turn in taken) for period in (2, 3, 7, 20) for rest in range(period))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest):
        Sampler(share)
