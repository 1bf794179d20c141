"""What a machine learns of the shared tier while that does not answer, and how it goes on afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support import make_chain, make_spec, store, wait_until
from .world import Machine, World, store_of

BLOCKS = 4
PREFILL_TOKENS_PER_S = 1000.0  # a block takes 16 ms


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, Machine]]:
    quick = {"probe_timeout": 0.2, "transfer_timeout": 20.0}
    a, b = (Machine(world, tmp_path, name, {"shared": dict(quick)}, monkeypatch) for name in ("a", "b"))
    yield a, b
    world.stuck.clear()
    a.close()
    b.close()


def test_a_block_that_came_after_an_outage_says_nothing_of_the_tiers_speed(
    world: World, pair: tuple[Machine, Machine]
) -> None:
    a, b = pair
    spec = make_spec()
    first, second = make_chain(spec, BLOCKS), make_chain(spec, BLOCKS, seed=1)
    for machine in pair:
        machine.cache.register(spec)
    for chain in (first, second):
        store(a.cache, spec, chain)
    a.cache.flush()
    wait_until(lambda: b.cache.lookup(first).blocks == BLOCKS)  # what is asked next is for the blocks themselves

    asking = threading.Thread(target=lambda: b.cache.acquire(first, wait_s=20.0).release())
    world.stuck.add("get")
    asking.start()
    wait_until(lambda: any(call == "get" for call, _ in world.calls))
    world.stuck.add("get_many")  # what is asked regularly is not answered either: an outage
    wait_until(lambda: store_of(b).health.opened > 0)
    world.stuck.clear()
    asking.join()

    wait_until(lambda: store_of(b).available)
    b.cache.lookup(second)
    wait_until(lambda: b.cache.lookup(second).blocks == BLOCKS)
    with b.cache.acquire(second, wait_s=20.0, prefill_tokens_per_s=PREFILL_TOKENS_PER_S) as read:
        assert read.choice.reason != "recompute"
        assert read.choice.load_blocks == BLOCKS
