"""Breakpoints: pins that live for as long as somebody hits their prefix, in a cache whose clock is set forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tierkv
from tierkv.cache import Chain
from tierkv.core.tenants import Tenant
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LimitExceeded
from tierkv.spec import KVGroup, KVSpec

from .control import Clock, nothing_is_held
from .support import BLOCK_BYTES, head, make_chain, make_spec, store, store_far, wait_until

WHOLE = 128  # blocks that fill the warm tier
HALF = WHOLE // 2
TTL_S, LONG_S = 300.0, 3600.0


class World:
    """One tenant's cache, and the breakpoints of one namespace."""

    def __init__(self, cache: EmbeddedCache, clock: Clock, spec: KVSpec) -> None:
        self.cache, self.clock, self.spec = cache, clock, spec
        self.tenant: Tenant = cache.engine.tenant("default")
        cache.register(spec)

    def place(self, chain: Chain, *points: tuple[int, float]) -> list[tuple[int, int, float]]:
        """Blocks, bytes and seconds of each."""
        placed = self.cache.engine.hints.place(self.tenant, chain.namespace, chain.hashes, points)
        return [(pinned.blocks, pinned.nbytes, ttl_s) for pinned, ttl_s in placed]

    def live(self) -> int:
        return int(self.cache.stats()["leases"]["pin"])

    def expired(self) -> int:
        return int(self.cache.stats()["counters"]["expired_leases"].get("pin", 0))

    def hit(self, chain: Chain, **terms: int) -> int:
        with self.cache.acquire(chain, wait_s=0.0, **terms) as read:
            return read.hit_blocks

    def pass_time(self, seconds: float, live: int) -> None:
        """Let time pass, after which so many pins are there."""
        self.clock.advance(seconds)
        engine = self.cache.engine
        with engine._state.lock:  # else its own thread does it, soon
            engine._expire(self.clock.now())
        assert self.live() == live


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    capacity = getattr(request, "param", "1MiB")
    with tierkv.open({"warm": {"capacity": capacity, "policy": "lru"}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield World(cache, Clock(monkeypatch, cache), make_spec())


@pytest.fixture
def chain(world: World) -> Chain:
    chain = make_chain(world.spec, 20)
    store(world.cache, world.spec, chain)
    return chain


def test_every_hit_renews_it_and_without_any_it_ends(world: World, chain: Chain) -> None:
    assert world.place(chain, (20, TTL_S)) == [(20, 20 * BLOCK_BYTES, TTL_S)]
    for _ in range(3):
        world.pass_time(0.9 * TTL_S, 1)
        assert world.hit(chain) == 20
    before = world.expired()
    world.pass_time(0.9 * TTL_S, 1)
    world.pass_time(0.2 * TTL_S, 0)
    assert world.expired() == before + 1
    wait_until(lambda: nothing_is_held(world.cache))


def test_a_hit_of_less_than_its_prefix_does_not_renew_it(world: World, chain: Chain) -> None:
    world.place(chain, (20, TTL_S))
    world.pass_time(0.9 * TTL_S, 1)
    assert world.hit(chain, max_blocks=19) == 19
    world.cache.lookup(chain)
    assert world.hit(make_chain(world.spec, 20, 5)) == 0
    world.pass_time(0.2 * TTL_S, 0)


def test_a_hit_of_a_longer_prompt_renews_all_breakpoints_in_it(world: World, chain: Chain) -> None:
    world.place(chain, (5, TTL_S), (20, TTL_S), (12, LONG_S))
    assert world.live() == 3
    world.pass_time(0.9 * TTL_S, 3)
    assert world.hit(head(chain, 13)) == 13
    world.pass_time(0.2 * TTL_S, 2)  # the longest was not hit
    world.pass_time(0.8 * TTL_S, 1)  # that of an hour is left
    world.pass_time(LONG_S, 0)


def test_blocks_that_are_read_in_place_and_reported_renew_it(world: World, chain: Chain) -> None:
    world.place(chain, (3, TTL_S))
    world.pass_time(0.9 * TTL_S, 1)
    world.cache.engine.uses.report(world.tenant, chain.namespace, 0, chain.hashes[:3])
    world.pass_time(0.9 * TTL_S, 1)


def test_another_tenants_hit_renews_nothing(world: World, chain: Chain) -> None:
    other = world.cache.for_tenant("other")
    store(other, world.spec, chain)
    world.place(chain, (20, TTL_S))
    world.pass_time(0.9 * TTL_S, 1)
    with other.acquire(chain, wait_s=0.0) as read:
        assert read.hit_blocks == 20
    world.pass_time(0.2 * TTL_S, 0)


def test_its_blocks_stay_while_others_come_and_go(world: World, chain: Chain) -> None:
    world.place(chain, (7, TTL_S))
    world.pass_time(0.5 * TTL_S, 1)
    for seed in (2, 3):
        store_far(world.cache, world.spec, make_chain(world.spec, WHOLE - 20, seed))
    assert world.cache.lookup(chain).blocks == 7
    world.pass_time(TTL_S, 0)
    for seed in (4, 5):
        store_far(world.cache, world.spec, make_chain(world.spec, WHOLE - 20, seed))
    assert world.cache.lookup(chain).blocks == 0


def test_of_two_times_the_longer_counts(world: World, chain: Chain) -> None:
    assert [ttl_s for *_, ttl_s in world.place(chain, (9, TTL_S), (9, LONG_S))] == [LONG_S, LONG_S]
    assert world.live() == 1
    assert [ttl_s for *_, ttl_s in world.place(chain, (9, TTL_S))] == [LONG_S]
    world.pass_time(LONG_S - 1, 1)
    world.clock._ahead += 2  # it has ended, if nobody has noticed yet
    assert [ttl_s for *_, ttl_s in world.place(chain, (9, TTL_S))] == [TTL_S]


def test_a_breakpoint_and_a_pin_of_one_prefix_do_not_end_each_other(world: World, chain: Chain) -> None:
    world.cache.pin(chain, LONG_S)
    world.place(chain, (20, TTL_S))
    assert world.live() == 2
    assert world.cache.unpin(chain) == 20
    assert world.live() == 1
    world.cache.pin(chain, LONG_S)
    world.pass_time(TTL_S + 1, 1)
    assert world.cache.unpin(chain) == 20


def test_blocks_that_several_breakpoints_hold_count_once(world: World) -> None:
    chain = make_chain(world.spec, HALF)
    store(world.cache, world.spec, chain)
    placed = world.place(chain, (HALF, TTL_S), (HALF - 1, TTL_S), (10, LONG_S))
    assert [blocks for blocks, *_ in placed] == [HALF, HALF - 1, 10]
    other = make_chain(world.spec, 10, 2)
    store(world.cache, world.spec, other)
    with pytest.raises(LimitExceeded):
        world.cache.pin(other, LONG_S)
    world.pass_time(TTL_S + 1, 1)
    assert world.cache.pin(other, 1.0).blocks == 10


def test_one_too_many_changes_nothing(world: World, chain: Chain) -> None:
    world.place(chain, (20, TTL_S))
    store(world.cache, world.spec, other := make_chain(world.spec, HALF - 19, 2))
    with pytest.raises(LimitExceeded) as raised:
        world.place(other, (1, LONG_S), (HALF - 19, TTL_S))
    assert raised.value.remedy
    assert world.live() == 1
    assert [blocks for blocks, *_ in world.place(other, (HALF - 20, TTL_S))] == [HALF - 20]


def test_it_holds_what_is_published(world: World) -> None:
    chain = make_chain(world.spec, 8)
    assert world.place(chain, (8, TTL_S)) == [(0, 0, TTL_S)]
    store(world.cache, world.spec, head(chain, 3))
    assert world.place(chain, (8, TTL_S), (2, TTL_S), (0, TTL_S), (99, TTL_S)) == [
        (3, 3 * BLOCK_BYTES, TTL_S),
        (2, 2 * BLOCK_BYTES, TTL_S),
        (0, 0, TTL_S),
        (3, 3 * BLOCK_BYTES, TTL_S),
    ]
    store(world.cache, world.spec, chain)
    assert world.place(chain, (8, TTL_S))[0][0] == 8


@pytest.mark.parametrize("world", ["8MiB"], indirect=True)
def test_a_window_needs_other_blocks_for_each_breakpoint(world: World) -> None:
    """The shorter prefix holds window blocks that the longer does not: both count, and none is placed alone."""
    spec = make_spec(KVGroup((0,), "full", 1, 16), KVGroup((1,), "sliding_window", 1, 64, window=16))
    world.cache.register(spec)
    chain = make_chain(spec, 24)
    store(world.cache, spec, chain)
    long, short = world.place(chain, (24, TTL_S), (12, TTL_S))
    assert world.live() == 2
    assert (long[0], short[0]) == (24, 12)
    held = world.cache.engine.hints._pinned._nbytes[world.tenant.id]
    sizes = [spec.layout(group).nbytes for group in range(2)]
    assert held == 24 * sizes[0] + long[1] - 24 * sizes[0] + short[1] - 12 * sizes[0]
    assert held < long[1] + short[1]
    world.cache.clear(spec.namespace)
    world.pass_time(TTL_S + 1, 0)
    wait_until(lambda: nothing_is_held(world.cache))
