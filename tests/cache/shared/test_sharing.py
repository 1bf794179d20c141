"""Machines that share blocks: what one has stored the others use, and whatever happens there costs nothing but hits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.cache import Cache, Chain
from tierkv.spec import KVGroup, KVSpec

from ..support import assert_intact, make_chain, make_spec, payload, store, wait_until
from .world import Machine, World

BLOCKS = 8


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def start(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a machine: `start("a")`; settings replace those of the configuration."""
    running: list[Machine] = []

    def begin(name: str, **settings: Any) -> Machine:
        machine = Machine(world, tmp_path, name, settings, monkeypatch)
        running.append(machine)
        return machine

    yield begin
    world.down, world.stuck = False, set()
    for machine in running:
        machine.close()


def both(spec: KVSpec, *found: Machine) -> None:
    for machine in found:
        machine.cache.register(spec)


def one_stored(start: Any, *groups: KVGroup, **settings: Any) -> tuple[Machine, Machine, KVSpec, Chain]:
    """Two machines, the first of which has stored a chain, which the tier has by now; `settings` of the second."""
    a, b = start("a"), start("b", **settings)
    spec = make_spec(*groups)
    both(spec, a, b)
    chain = make_chain(spec, BLOCKS)
    store(a.cache, spec, chain)
    a.cache.flush()
    return a, b, spec, chain


def reused(cache: Cache, spec: KVSpec, chain: Chain, wait_s: float = 5.0, **more: Any) -> dict[str, int]:
    """Tokens by tier of an acquire, every block of it compared."""
    with cache.acquire(chain, wait_s=wait_s, **more) as read:
        assert_intact(read, spec, chain)
        return dict(read.tokens_by_tier)


def test_what_one_machine_has_stored_another_uses(start: Any) -> None:
    _, b, spec, chain = one_stored(start)
    tokens = BLOCKS * spec.block_tokens
    assert reused(b.cache, spec, chain) == {"shared": tokens}
    assert reused(b.cache, spec, chain) == {"warm": tokens}  # it is its own now


@pytest.mark.parametrize("groups", [(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 1, 32))])
def test_all_groups_of_a_block_travel(start: Any, groups: tuple[KVGroup, ...]) -> None:
    _, b, spec, chain = one_stored(start, *groups)
    assert reused(b.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}


def test_of_a_sliding_window_only_the_window_is_needed(start: Any) -> None:
    window = KVGroup((1,), "sliding_window", 1, 64, window=32)
    _, b, spec, chain = one_stored(start, KVGroup((0,), "full", 1, 64), window)
    assert reused(b.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}


def test_tenants_do_not_see_each_other_elsewhere_either(start: Any) -> None:
    _, b, spec, chain = one_stored(start)
    assert reused(b.cache.for_tenant("other"), spec, chain) == {}


def test_a_machine_with_another_secret_sees_nothing(start: Any, tmp_path: Path, world: World) -> None:
    a = start("a")
    spec = make_spec()
    both(spec, a)
    chain = make_chain(spec, BLOCKS)
    store(a.cache, spec, chain)
    a.cache.flush()
    secret = tmp_path / "other"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    c = start("c", secret=str(secret))
    both(spec, c)
    assert reused(c.cache, spec, chain) == {}


def test_a_prefetch_brings_blocks_from_elsewhere(start: Any) -> None:
    _, b, spec, chain = one_stored(start)
    ticket = b.cache.prefetch(chain)
    assert ticket.wait(5.0).state == "done"
    assert reused(b.cache, spec, chain, wait_s=0.0) == {"shared": BLOCKS * spec.block_tokens}


def test_a_lookup_knows_of_the_others_from_the_second_time_on(start: Any) -> None:
    _, b, _, chain = one_stored(start)
    b.cache.lookup(chain)
    wait_until(lambda: b.cache.lookup(chain).blocks == BLOCKS)
    assert set(b.cache.lookup(chain).tiers) == {"shared"}


def test_a_chain_is_asked_for_in_one_round_trip_and_an_absent_one_once_a_while(
    start: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.core.sharing.knowledge.ABSENT_S", 60.0)  # a while that a busy machine does not outlast
    a, b = start("a", shared={"sync": "1h"}), start("b", shared={"sync": "1h"})
    spec = make_spec()
    both(spec, a, b)
    chain = make_chain(spec, 64)
    store(a.cache, spec, chain)
    a.cache.flush()
    asked = world.asked("present")
    assert reused(b.cache, spec, chain) == {"shared": 64 * spec.block_tokens}
    assert world.asked("present") == asked + 1
    strange = make_chain(spec, 64, seed=5)
    reused(b.cache, spec, strange)
    asked = world.asked("present")
    reused(b.cache, spec, strange)
    assert world.asked("present") == asked


def test_a_block_that_is_gone_from_there_is_a_miss_and_what_precedes_it_a_hit(start: Any, world: World) -> None:
    _, b, spec, chain = one_stored(start)
    b.cache.lookup(chain)
    wait_until(lambda: b.cache.lookup(chain).blocks == BLOCKS)
    key = b.engine.tenant("team").block_key(chain.hashes[5], 0)
    (name,) = [name for name in world.blocks() if key.hex() in name]
    del world.values[name]
    assert reused(b.cache, spec, chain) == {"shared": 5 * spec.block_tokens}


def test_damage_is_found_counted_removed_and_repaired(start: Any, world: World) -> None:
    _, b, spec, chain = one_stored(start)
    key = b.engine.tenant("team").block_key(chain.hashes[3], 0)
    (name,) = [name for name in world.blocks() if key.hex() in name]
    damaged = bytearray(world.values[name])
    damaged[-100] ^= 1
    world.values[name] = bytes(damaged)
    assert reused(b.cache, spec, chain) == {"shared": 3 * spec.block_tokens}
    counted = b.cache.stats()["counters"]["corrupt_blocks"]
    assert sum(n for where, n in counted.items() if where.startswith("shared/")) == 1
    wait_until(lambda: name not in world.values)
    store(b.cache, spec, chain)
    b.cache.flush()
    assert name in world.values
    c = start("c")
    both(spec, c)
    assert reused(c.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}


def test_a_clear_reaches_every_machine(start: Any) -> None:
    a, b, spec, chain = one_stored(start)
    assert reused(b.cache, spec, chain)
    assert a.cache.clear(chain.namespace) == BLOCKS
    assert reused(a.cache, spec, chain) == {}
    wait_until(lambda: b.cache.lookup(chain).blocks == 0)
    assert reused(b.cache, spec, chain) == {}
    store(b.cache, spec, chain)  # and a new life begins
    b.cache.flush()
    wait_until(lambda: reused(a.cache, spec, chain) != {})


def test_a_machine_that_was_off_does_not_serve_what_was_cleared_meanwhile(start: Any) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain = make_chain(spec, BLOCKS)
    store(b.cache, spec, chain)
    b.cache.flush()
    b.close()
    both(spec, a)
    assert reused(a.cache, spec, chain)
    a.cache.clear(chain.namespace)
    b = start("b")
    both(spec, b)
    assert b.cache.lookup(chain).blocks == 0
    assert reused(b.cache, spec, chain) == {}


def test_a_deleted_block_is_deleted_everywhere(start: Any) -> None:
    a, b, spec, chain = one_stored(start)
    assert reused(b.cache, spec, chain)
    a.cache.delete(chain)
    assert a.cache.lookup(chain).blocks == BLOCKS - 1
    wait_until(lambda: b.cache.lookup(chain).blocks == BLOCKS - 1)


def test_a_tier_that_is_down_costs_the_hits_and_nothing_else(start: Any, world: World) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain, other = make_chain(spec, BLOCKS), make_chain(spec, BLOCKS, seed=1)
    store(a.cache, spec, chain)
    a.cache.flush()
    world.down = True
    assert reused(b.cache, spec, chain) == {}
    store(b.cache, spec, other)
    assert reused(b.cache, spec, other) == {"warm": BLOCKS * spec.block_tokens}
    assert b.cache.clear(other.namespace) >= BLOCKS
    world.down = False
    wait_until(lambda: a.cache.lookup(chain).blocks == 0)  # the clear is told when it is back


def test_a_tier_that_does_not_answer_holds_a_request_up_for_the_time_of_a_question(start: Any, world: World) -> None:
    a = start("a", shared={"probe_timeout": "50ms"})
    spec = make_spec()
    both(spec, a)
    world.stuck.add("present")
    began = time.monotonic()
    assert reused(a.cache, spec, make_chain(spec, BLOCKS), wait_s=30.0) == {}
    assert time.monotonic() - began < 5.0  # not 30
    assert a.cache.stats()["shared"]["probes"]["late"] == 1


def test_reads_that_hang_are_left_for_computing_when_that_is_known_to_pay(start: Any, world: World) -> None:
    _, b, _, chain = one_stored(start, shared={"transfer_timeout": "30s"})
    assert b.cache.lookup(chain, wait_s=5.0).blocks == BLOCKS  # or a busy machine may not wait for the answer
    world.stuck.add("get")
    began = time.monotonic()
    with b.cache.acquire(chain, wait_s=25.0, prefill_tokens_per_s=1000.0) as read:
        assert read.hit_blocks == 0
        assert read.choice.reason == "too_slow"
    assert time.monotonic() - began < 10.0
    world.stuck.clear()


def test_reads_that_hang_are_left_when_it_is_not_known_whether_computing_pays(
    start: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.core.payoff._QUIET_S", 0.1)
    _, b, spec, chain = one_stored(start, shared={"transfer_timeout": "30s"})
    assert b.cache.lookup(chain, wait_s=5.0).blocks == BLOCKS  # or a busy machine may not wait for the answer
    world.stuck.add("get")
    began = time.monotonic()
    with b.cache.acquire(chain, wait_s=25.0) as read:
        assert (read.hit_blocks, read.choice.reason) == (0, "unknown_prefill")
        assert read.missed_tokens == {"late": BLOCKS * spec.block_tokens}
    assert time.monotonic() - began < 10.0
    world.stuck.clear()  # it was only slow: what had begun arrives, and the next request profits
    monkeypatch.undo()
    assert reused(b.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}


def test_a_tier_that_is_slow_and_not_silent_is_waited_for_at_the_first_time_too(
    start: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.core.payoff._QUIET_S", 2.0)
    _, b, spec, chain = one_stored(start, shared={"in_flight": 1})
    world.slow_s = 3.0 / BLOCKS
    assert reused(b.cache, spec, chain, wait_s=25.0) == {"shared": BLOCKS * spec.block_tokens}


def test_a_full_tier_takes_nothing_and_gives_what_it_has(start: Any, world: World) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain, other = make_chain(spec, BLOCKS), make_chain(spec, BLOCKS, seed=1)
    store(a.cache, spec, chain)
    a.cache.flush()
    world.full = True
    store(a.cache, spec, other)
    wait_until(lambda: a.cache.stats()["shared"]["full"])
    assert reused(b.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}
    assert reused(b.cache, spec, other) == {}


def test_blocks_reach_it_as_they_are_coded_on_disk(start: Any, world: World) -> None:
    a = start("a", shared={"write": "demotion"})
    spec = make_spec()
    both(spec, a)
    chain = make_chain(spec, BLOCKS)
    store(a.cache, spec, chain)
    assert not world.blocks()
    a.cache.flush()
    assert len(world.blocks()) == BLOCKS
    cold = a.engine.placement.cold
    assert cold is not None
    for name in world.blocks():
        container, _ = cold.read_container(bytes.fromhex(name.rsplit("/", 1)[1]))  # type: ignore[attr-defined]
        assert world.values[name].endswith(bytes(container))


def test_blocks_that_are_used_often_enough_are_offered(start: Any, world: World) -> None:
    a = start("a", shared={"write": "hits", "hits": 2})
    spec = make_spec()
    both(spec, a)
    chain = make_chain(spec, BLOCKS)
    store(a.cache, spec, chain)
    reused(a.cache, spec, chain)
    a.cache.flush()
    assert not world.blocks()
    reused(a.cache, spec, chain)
    a.cache.flush()
    assert len(world.blocks()) == BLOCKS


def test_what_is_there_already_is_not_written_again(start: Any, world: World) -> None:
    _, b, spec, chain = one_stored(start)
    written = world.asked("put")
    store(b.cache, spec, chain)
    b.cache.flush()
    assert world.asked("put") == written


@pytest.mark.parametrize("write", ["all", "demotion"])
def test_it_is_asked_once_whether_it_has_what_is_to_be_written(start: Any, world: World, write: str) -> None:
    a = start("a", shared={"write": write})
    spec = make_spec()
    both(spec, a)
    store(a.cache, spec, make_chain(spec, BLOCKS))
    a.cache.flush()
    asked = Counter(name for method, names in world.calls if method == "present" for name in names)
    assert asked == dict.fromkeys(world.blocks(), 1)
    assert len(asked) == BLOCKS


def test_a_block_that_came_from_elsewhere_is_kept_as_one_of_its_own(start: Any, world: World) -> None:
    _, b, spec, chain = one_stored(start)
    assert reused(b.cache, spec, chain) == {"shared": BLOCKS * spec.block_tokens}
    b.cache.flush()
    b.close()
    world.values.clear()
    b = start("b")
    both(spec, b)
    assert reused(b.cache, spec, chain) == {"cold": BLOCKS * spec.block_tokens}


def test_nothing_is_written_where_computing_is_faster_than_fetching(start: Any, world: World) -> None:
    a = start("a")
    spec = make_spec()
    both(spec, a)
    state = a.engine._state
    with state.lock:
        for n in range(4):
            state.prefill_rates.learn(spec.namespace, spec.block_tokens, 0.001)
            state.delivery_rates.note(
                state.placement.shared_level, 8192, time.monotonic() + n, time.monotonic() + n + 1
            )
    store(a.cache, spec, make_chain(spec, BLOCKS))
    a.cache.flush()
    assert not world.blocks()
    assert a.cache.stats()["shared"]["skipped"] == {"cheaper_computed": BLOCKS}


def test_two_machines_compute_a_common_prompt_once(start: Any) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain = make_chain(spec, BLOCKS)
    mine = a.cache.acquire(chain, wait_s=5.0, compute_s=30.0)
    assert mine.compute is not None
    found: dict[str, Any] = {}

    def ask() -> None:
        with b.cache.acquire(chain, wait_s=20.0, compute_s=30.0) as read:
            assert_intact(read, spec, chain)
            found.update(hit=read.hit_blocks, compute=read.compute, missed=dict(read.missed_tokens))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: b.engine._state.sharing._follower._followed)  # type: ignore[union-attr]
    with a.cache.reserve(chain) as lease:
        for grant in lease.granted:
            lease.buffer(grant.index)[:] = payload(spec, chain, grant.index)
            lease.commit([grant.index])
    asking.join(30.0)
    assert found == {"hit": BLOCKS, "compute": None, "missed": {}}


def test_a_machine_that_dies_while_computing_holds_nobody_up(start: Any) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain = make_chain(spec, BLOCKS)
    dead = a.cache.acquire(chain, wait_s=5.0, compute_s=0.3)  # no progress: as good as dead
    assert dead.compute is not None
    with b.cache.acquire(chain, wait_s=20.0, compute_s=5.0) as read:
        assert read.compute is not None
        read.compute.release()


def test_one_engine_hands_over_to_another(start: Any) -> None:
    a, b = start("a"), start("b")
    spec = make_spec()
    both(spec, a, b)
    chain = make_chain(spec, BLOCKS)
    found: dict[str, Any] = {}

    def decode() -> None:
        with b.cache.acquire(chain, wait_s=20.0, handoff=True) as read:
            assert_intact(read, spec, chain)
            found.update(hit=read.hit_blocks, compute=read.compute)

    decoding = threading.Thread(target=decode)
    decoding.start()
    wait_until(lambda: b.engine._state.sharing._follower._followed)  # type: ignore[union-attr]
    store(a.cache, spec, chain)
    decoding.join(30.0)
    assert found == {"hit": BLOCKS, "compute": None}


def test_a_handoff_that_never_comes_ends_at_its_deadline(start: Any) -> None:
    b = start("b")
    spec = make_spec()
    both(spec, b)
    with b.cache.acquire(make_chain(spec, BLOCKS), wait_s=0.2, handoff=True) as read:
        assert read.hit_blocks == 0


def test_a_block_that_is_being_loaded_can_be_stored_meanwhile(start: Any, world: World) -> None:
    _, b, spec, chain = one_stored(start)
    b.cache.lookup(chain)
    wait_until(lambda: b.cache.lookup(chain).blocks == BLOCKS)
    lease = b.cache.reserve(chain)  # it computes them all the same
    assert len(lease.granted) == BLOCKS
    world.stuck.add("get")
    b.cache.prefetch(chain)
    wait_until(lambda: world.calls[-1][0] == "get" or any(name == "get" for name, _ in world.calls))
    for grant in lease.granted:
        lease.buffer(grant.index)[:] = payload(spec, chain, grant.index)
    assert lease.commit() == BLOCKS
    lease.abort()
    world.stuck.clear()
    assert reused(b.cache, spec, chain) == {"warm": BLOCKS * spec.block_tokens}
    wait_until(lambda: not b.engine._loader._running)
    assert reused(b.cache, spec, chain) == {"warm": BLOCKS * spec.block_tokens}


def test_a_lookup_that_waits_knows_of_the_others_at_once(start: Any) -> None:
    _, b, _, chain = one_stored(start)
    assert b.cache.lookup(chain, wait_s=5.0).tiers == ("shared",) * BLOCKS


def test_a_chain_that_begins_in_the_middle_keeps_its_blocks_in_their_place(start: Any) -> None:
    """Engines ask for the rest of a prompt by the hashes of the rest alone."""
    _, b, _, chain = one_stored(start)
    rest = Chain(chain.namespace, chain.hashes[5:])
    with b.cache.acquire(rest, wait_s=5.0) as read:
        assert read.hit_blocks == BLOCKS - 5
    key = b.engine.tenant("team").block_key(chain.hashes[5], 0)
    entry = b.engine._state.index.awake(key)
    assert entry is not None
    assert (entry.meta.depth, entry.meta.parent) == (5, b.engine.tenant("team").block_key(chain.hashes[4], 0))
