"""Eviction policies against obvious models of their rules, and what all of them promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.models import Model, SlowARC, SlowLRU, SlowS3FIFO, SlowSLRU
from tierkv.errors import ConfigError
from tierkv.policy import POLICIES, EvictionPolicy, check_policy, make_policy
from tierkv.policy.slru import SLRU

keys = st.integers(0, 5).map(lambda n: bytes([n]))
steps = st.lists(
    st.tuples(
        st.sampled_from(
            [*["insert"] * 3, *["touch"] * 4, "refresh", "retire", "remove", "evict", "evict-first", "resize"]
        ),
        keys,
        st.integers(1, 3),
    ),
    max_size=80,
)


def agree(policy: EvictionPolicy[bytes], model: Model, changes: list[tuple[str, bytes, int]]) -> None:
    for what, key, size in changes:
        if what == "insert":
            policy.insert(key, size)
            model.insert(key, size)
        elif what == "resize":
            policy.resize(4 * size)
            model.resize(4 * size)
        elif what.startswith("evict"):
            order = model.order()
            if order:
                victim = order[0 if what == "evict-first" else size % len(order)]
                policy.evict(victim)
                model.evict(victim)
        else:
            getattr(policy, what)(key)
            getattr(model, what)(key)
        assert list(policy.victims()) == model.order()
        assert len(policy) == len(model.sizes)
        assert (key in policy) == (key in model.sizes)


@given(steps, st.integers(0, 12))
def test_lru_is_what_its_rules_say(changes: list[tuple[str, bytes, int]], capacity: int) -> None:
    agree(make_policy("lru", capacity), SlowLRU(capacity), changes)


@given(steps, st.integers(0, 12), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_slru_is_what_its_rules_say(
    changes: list[tuple[str, bytes, int]], capacity: int, protected: float, ghost: float
) -> None:
    policy: EvictionPolicy[bytes] = make_policy("slru", capacity, protected=protected, ghost=ghost)
    agree(policy, SlowSLRU(capacity, protected, ghost), changes)


@given(steps, st.integers(0, 12), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_s3fifo_is_what_its_rules_say(
    changes: list[tuple[str, bytes, int]], capacity: int, small: float, ghost: float
) -> None:
    policy: EvictionPolicy[bytes] = make_policy("s3fifo", capacity, small=small, ghost=ghost)
    agree(policy, SlowS3FIFO(capacity, small, ghost), changes)


def test_s3fifo_gives_three_more_rounds_at_most() -> None:
    policy: EvictionPolicy[int] = make_policy("s3fifo", 10)

    def into_main(key: int) -> None:
        policy.insert(key, 1)
        policy.evict(key)
        policy.insert(key, 1)

    into_main(0)
    for _ in range(5):
        policy.touch(0)
    victims = []
    for key in range(1, 5):
        into_main(key)
        victims.append(next(policy.victims()))
        policy.evict(victims[-1])
    assert victims == [1, 2, 3, 0]


@given(steps, st.integers(0, 12))
def test_arc_is_what_its_rules_say(changes: list[tuple[str, bytes, int]], capacity: int) -> None:
    agree(make_policy("arc", capacity), SlowARC(capacity), changes)


@pytest.mark.parametrize("name", POLICIES)
@given(changes=steps, capacity=st.integers(0, 40))
def test_every_policy_orders_what_is_resident(name: str, changes: list[tuple[str, bytes, int]], capacity: int) -> None:
    policy: EvictionPolicy[bytes] = make_policy(name, capacity)
    resident: set[bytes] = set()
    retired: list[bytes] = []
    for what, key, size in changes:
        if what == "insert":
            policy.insert(key, size)
            resident.add(key)
        elif what == "resize":
            before = list(policy.victims())
            policy.resize(10 * size)
            if name not in ("arc", "s3fifo"):  # in which the sizes of their parts decide who is next
                assert list(policy.victims()) == before
        elif what == "evict-first":
            first = next(policy.victims(), None)
            if first is not None:
                policy.evict(first)
                key = first
                resident.remove(key)
        else:
            getattr(policy, what)(key)
            if what in ("evict", "remove"):
                resident.discard(key)
        if what != "resize":
            retired = [other for other in retired if other != key]
        if what == "retire" and key in resident:
            retired.insert(0, key)
        order = list(policy.victims())
        assert order[: len(retired)] == retired
        assert sorted(order) == sorted(resident)
        assert len(policy) == len(resident)


@pytest.mark.parametrize("name", POLICIES)
def test_a_key_is_whatever_can_be_hashed(name: str) -> None:
    first, second = object(), object()
    policy: EvictionPolicy[object] = make_policy(name, 2)
    policy.insert(first, 1)
    policy.insert(second, 1)
    assert list(policy.victims()) == [first, second]
    policy.retire(second)
    assert list(policy.victims()) == [second, first]


@pytest.mark.parametrize("name", ["slru", "aslru", "s3fifo", "arc"])
def test_ghosts_are_forgotten(name: str) -> None:
    class Key:
        alive = 0

        def __init__(self) -> None:
            Key.alive += 1

        def __del__(self) -> None:
            Key.alive -= 1

    policy: EvictionPolicy[Key] = make_policy(name, 64)
    for _ in range(5000):
        key = Key()
        policy.insert(key, 1)
        policy.evict(key)
    assert len(policy) == 0
    assert Key.alive < 64 * 10


def hits(policy: EvictionPolicy[int], capacity: int, uses: list[int]) -> int:
    found = 0
    for key in uses:
        if key in policy:
            found += 1
            policy.touch(key)
            continue
        if len(policy) == capacity:
            policy.evict(next(policy.victims()))
        policy.insert(key, 1)
    return found


def loops(keys: int, rounds: int, noise: int) -> list[int]:
    """A set of keys used round after round, and between the rounds `noise` keys that are used once."""
    fresh = iter(range(10**6, 10**9))
    return [key for _ in range(rounds) for key in [*range(keys), *(next(fresh) for _ in range(noise))]]


def moving(keys: int, rounds: int, sets: int) -> list[int]:
    """A set of keys used for some rounds, then another one."""
    return [key for first in range(0, keys * sets, keys) for _ in range(rounds) for key in range(first, first + keys)]


@pytest.mark.parametrize(
    ("uses", "suits", "does_not"),
    [(loops(keys=300, rounds=60, noise=500), 0.9, 0.3), (moving(keys=350, rounds=3, sets=60), 0.0, 0.3)],
)
def test_aslru_finds_the_share_that_suits(uses: list[int], suits: float, does_not: float) -> None:
    capacity = 400
    found = hits(make_policy("aslru", capacity), capacity, uses)
    assert found > 0.95 * hits(SLRU(capacity, suits), capacity, uses)
    assert found > 1.5 * hits(SLRU(capacity, does_not), capacity, uses)


def test_policies_are_made_by_name() -> None:
    assert set(POLICIES) == {"lru", "slru", "aslru", "s3fifo", "arc"}
    assert isinstance(make_policy("slru", 10), SLRU)
    with pytest.raises(ConfigError, match="unknown eviction policy 'mru'"):
        make_policy("mru", 10)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("slur", {}, ["'slur'", "did you mean 'slru'?"]),
        ("belady", {}, ["unknown"]),
        (["slru"], {}, ["unknown"]),
        ("slru", {"protcted": 0.5}, ["no parameter 'protcted'", "did you mean 'protected'?"]),
        ("slru", {3: 0.5}, ["no parameter 3"]),
        ("lru", {"ghost": 2}, ["no parameter 'ghost'", "leave it out"]),
        ("slru", {"protected": 1.5}, ["1.5", "from 0 to 1"]),
        ("slru", {"protected": float("nan")}, ["nan"]),
        ("slru", {"ghost": -1}, ["-1"]),
        ("slru", {"ghost": True}, ["True"]),
        ("s3fifo", {"small": "0.1"}, ["'0.1'"]),
    ],
)
def test_wrong_choices_are_explained(name: object, parameters: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_policy(name, parameters)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", POLICIES)
def test_the_ends_of_every_range_are_allowed(name: str) -> None:
    for parameter, ends in POLICIES[name].parameters.items():
        for value in ends:
            policy: EvictionPolicy[int] = make_policy(name, 8, **{parameter: value})
            assert hits(policy, 8, loops(keys=4, rounds=3, noise=3)) > 0
