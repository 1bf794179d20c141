"""Receipts: what a request had from the cache and left in it, in other people's words; the parts sum to the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierkv
from tests.cache.support import BLOCK_TOKENS, make_chain, make_spec, write
from tierkv.cache import Cache
from tierkv.errors import InvalidRequest
from tierkv.insight.breakpoints import TTL_S, Breakpoint
from tierkv.insight.usage import Usage, created_tokens_of

TOKENS = st.integers(0, 5000)


@pytest.fixture(scope="module")
def cache() -> Iterator[Cache]:
    with tierkv.open({"warm": {"capacity": "8MiB"}}) as cache:
        yield cache


def test_a_request_and_the_next_one(cache: Cache) -> None:
    spec = make_spec()
    cache.register(spec)
    chain, prompt_tokens = make_chain(spec, 5), 4 * BLOCK_TOKENS + 9  # block 4 reaches into the answer
    with cache.acquire(chain, max_blocks=4, wait_s=0.0) as read, cache.reserve(chain) as lease:
        write(lease, spec, chain)
        lease.commit()
    first = Usage.of(prompt_tokens, BLOCK_TOKENS, read, lease, completion_tokens=7)
    assert (first.cached_tokens, first.created_tokens) == (0, 4 * BLOCK_TOKENS)
    assert first.to_anthropic() == {
        "input_tokens": 9,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 64,
        "cache_creation": {"ephemeral_5m_input_tokens": 64, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 7,
    }
    with cache.acquire(chain, max_blocks=4, prefill_tokens_per_s=100.0) as read, cache.reserve(chain) as lease:
        assert not lease.granted
    second = Usage.of(prompt_tokens, BLOCK_TOKENS, read, lease, completion_tokens=7)
    assert second.to_openai() == {
        "prompt_tokens": 73,
        "completion_tokens": 7,
        "total_tokens": 80,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    assert second.to_anthropic()["input_tokens"] == 9
    assert second.cached_tokens_by_tier == {"warm": 64}
    assert second.saved_s == pytest.approx(0.64)


def usage(cached: int, created: int, rest: int) -> Usage:
    return Usage(cached + created + rest, 3, cached, created)


@given(TOKENS, TOKENS, TOKENS, st.lists(st.builds(Breakpoint, st.integers(0, 15000), st.sampled_from(sorted(TTL_S)))))
def test_the_three_kinds_of_input_are_the_prompt(
    cached: int, created: int, rest: int, points: list[Breakpoint]
) -> None:
    for given_points in (None, points):
        told = usage(cached, created, rest).to_anthropic(given_points)
        by_class = told["cache_creation"]
        assert told["cache_read_input_tokens"] == cached
        assert sum(by_class.values()) == told["cache_creation_input_tokens"] <= created
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(told[part] for part in parts) == cached + created + rest
        assert min(*by_class.values(), told["input_tokens"]) >= 0


@pytest.mark.parametrize(
    ("points", "five_minutes", "an_hour"),
    [
        ([], 0, 0),
        ([Breakpoint(100)], 0, 0),  # all of it was read
        ([Breakpoint(300)], 200, 0),
        ([Breakpoint(300, "1h")], 0, 200),
        ([Breakpoint(150, "1h"), Breakpoint(300)], 150, 50),
        ([Breakpoint(50, "1h"), Breakpoint(300)], 200, 0),
        ([Breakpoint(9999)], 400, 0),
    ],
)
def test_what_is_created_is_kept_as_the_breakpoints_say(
    points: list[Breakpoint], five_minutes: int, an_hour: int
) -> None:
    told = usage(100, 400, 20).to_anthropic(points)
    assert told["cache_creation"] == {
        "ephemeral_5m_input_tokens": five_minutes,
        "ephemeral_1h_input_tokens": an_hour,
    }


def test_blocks_of_the_answer_are_not_created_tokens_of_the_prompt() -> None:
    assert created_tokens_of([0, 1, 1, 2, 3], 40, 16) == 32


@pytest.mark.parametrize("control", [{}, {"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"}])
def test_a_cache_control_that_is_none(control: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Breakpoint.of(10, control)
    assert raised.value.remedy


def test_cache_control() -> None:
    assert Breakpoint.of(40, {"type": "ephemeral"}) == Breakpoint(40, "5m")
    point = Breakpoint.of(40, {"type": "ephemeral", "ttl": "1h"})
    assert (TTL_S[point.ttl], point.blocks(16)) == (3600.0, 2)
