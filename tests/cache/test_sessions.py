"""Sessions that end or pause, and pins: hints that move blocks in the order of eviction and never out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierkv
from tierkv.cache import Cache, Chain, Pinned
from tierkv.core import hints
from tierkv.embedded import EmbeddedCache
from tierkv.errors import InvalidRequest, LimitExceeded, NotFound
from tierkv.spec import KVGroup, KVSpec

from .conftest import Deployment
from .control import Clock, HeldReads, nothing_is_held
from .support import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    assert_intact,
    head,
    make_chain,
    make_spec,
    store,
    store_far,
    wait_until,
    write,
)

WHOLE = 128  # blocks that fill the warm tier
SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB", "codec": "raw"}}
LONG_S = 600.0


@pytest.fixture
def spec(spec: KVSpec, cache: Cache) -> Iterator[KVSpec]:
    """A namespace that is emptied after the test: each fills the memory to a known measure."""
    yield spec
    cache.clear(spec.namespace)
    assert cache.stats()["leases"]["pin"] == 0


def say(cache: Cache, spec: KVSpec, chain: Chain, session: str) -> None:
    """A turn of a conversation: use what is there, store what is missing."""
    with cache.acquire(chain, session=session) as read, cache.reserve(chain, session=session, wait_s=20.0) as lease:
        assert_intact(read, spec, chain)
        write(lease, spec, chain)
        lease.commit()


def in_memory(cache: Cache, chain: Chain) -> int:
    """Length of the prefix that is in the warm tier."""
    tiers = cache.lookup(chain).tiers
    return next((n for n, tier in enumerate(tiers) if tier != "warm"), len(tiers))


def forked(spec: KVSpec, trunk: int, own: int, seed: int) -> Chain:
    """A prompt whose first blocks are everybody's."""
    common, rest = np.arange(trunk * BLOCK_TOKENS), np.arange(own * BLOCK_TOKENS) + ((seed + 1) << 20)
    return Chain.of(spec, np.concatenate([common, rest]))


def push(cache: Cache, spec: KVSpec, blocks: int, seed: int = 50) -> None:
    """Ask for room for so many blocks of a prompt nobody else uses."""
    cache.flush()
    store(cache, spec, make_chain(spec, blocks, seed))


def test_an_ended_session_leaves_first_from_its_tail(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    older, ended = make_chain(spec, 60, 1), make_chain(spec, 20, 2)
    say(cache, spec, older, "older")
    say(cache, spec, ended, "ended")
    assert peer.end_session(spec.namespace, "ended") == 20
    push(cache, spec, WHOLE - 80)
    assert in_memory(cache, ended) == 20  # there was room: it is served until it has left
    push(cache, spec, 6, 51)
    assert (in_memory(cache, older), in_memory(cache, ended)) == (60, 14)
    push(cache, spec, 14, 52)
    assert (in_memory(cache, older), in_memory(cache, ended)) == (60, 0)
    with peer.acquire(ended, wait_s=20.0) as read:
        assert read.tokens_by_tier == {"cold": 20 * BLOCK_TOKENS}
        assert_intact(read, spec, ended)


def test_without_the_hint_the_oldest_leaves_first(cache: Cache, spec: KVSpec) -> None:
    older, ended = make_chain(spec, 60, 1), make_chain(spec, 20, 2)
    say(cache, spec, older, "older")
    say(cache, spec, ended, "ended")
    push(cache, spec, WHOLE - 80 + 20)
    assert (in_memory(cache, older), in_memory(cache, ended)) == (40, 20)


def test_the_trunk_of_several_sessions_stays(cache: Cache, spec: KVSpec) -> None:
    one, two = forked(spec, 10, 20, 1), forked(spec, 10, 30, 2)
    say(cache, spec, one, "one")
    say(cache, spec, two, "two")
    assert cache.end_session(spec.namespace, "one") == 20
    push(cache, spec, WHOLE - 60 + 20)
    assert (in_memory(cache, one), in_memory(cache, two)) == (10, 40)
    # The other now has the trunk to itself, but it was shared once.
    assert cache.end_session(spec.namespace, "two") == 30
    push(cache, spec, 30, 51)
    assert in_memory(cache, two) == 10


def test_what_a_request_without_a_session_used_is_shared(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 10)
    say(cache, spec, chain, "chat")
    cache.acquire(head(chain, 4)).release()
    assert cache.end_session(spec.namespace, "chat") == 6


def test_what_was_stored_without_a_session_is_nobodys_own(cache: Cache, spec: KVSpec) -> None:
    """Others may have stored more behind it: the head must not leave before their tails."""
    chain = make_chain(spec, 20, 1)
    store(cache, spec, chain)
    with cache.acquire(head(chain, 10), session="guest") as read:
        assert read.hit_blocks == 10
    assert cache.end_session(spec.namespace, "guest") == 0


def test_a_growing_conversation_is_private_to_its_end(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 30)
    for blocks in (5, 12, 30):
        say(cache, spec, head(chain, blocks), "chat")
    assert cache.end_session(spec.namespace, "chat") == 30
    assert cache.end_session(spec.namespace, "chat") == 0  # it is over


def test_a_block_touched_after_the_end_is_safe_again(cache: Cache, spec: KVSpec) -> None:
    older, ended = make_chain(spec, 60, 1), make_chain(spec, 20, 2)
    say(cache, spec, older, "older")
    say(cache, spec, ended, "ended")
    assert cache.end_session(spec.namespace, "ended") == 20
    with cache.acquire(head(ended, 8)) as read:
        assert_intact(read, spec, ended)
    push(cache, spec, WHOLE - 80 + 20)
    assert in_memory(cache, ended) == 8
    assert in_memory(cache, older) == 60 - 8


def test_unknown_sessions_have_nothing(cache: Cache, deployment: Deployment, spec: KVSpec) -> None:
    assert cache.end_session(spec.namespace, "nobody") == 0
    assert cache.pause_session(spec.namespace, "nobody", 1.0) == 0
    other, chain = make_spec(), make_chain(spec, 3)
    cache.register(other)
    say(cache, spec, chain, "chat/with a strange name?")
    stranger = deployment.connect("stranger")
    assert stranger.end_session(spec.namespace, "chat/with a strange name?") == 0
    assert cache.end_session(other.namespace, "chat/with a strange name?") == 0
    assert cache.end_session(spec.namespace, "chat/with a strange name?") == 3


def test_all_groups_of_a_session_leave_together(tmp_path: Path) -> None:
    with tierkv.open({"warm": {"capacity": "16MiB", "directory": str(tmp_path)}}) as cache:
        spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "mla", 1, 64))
        cache.register(spec)
        chain = make_chain(spec, 3)
        say(cache, spec, chain, "chat")
        assert cache.end_session(spec.namespace, "chat") == 6


def test_a_short_pause_holds_what_the_session_used(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    say(cache, spec, chain, "chat")
    assert peer.pause_session(spec.namespace, "chat", 50.0) == 20
    assert cache.stats()["leases"]["pin"] == 1
    cache.flush()
    store_far(cache, spec, make_chain(spec, 3 * WHOLE, 1))
    assert in_memory(cache, chain) == 20
    assert peer.pause_session(spec.namespace, "chat", 40.0) == 20  # another pause replaces the first
    assert cache.stats()["leases"]["pin"] == 1
    assert cache.end_session(spec.namespace, "chat") == 20
    assert cache.stats()["leases"]["pin"] == 0
    push(cache, spec, 30)
    assert in_memory(cache, chain) == 0


def test_a_pause_of_more_than_may_be_pinned_is_only_a_hint(cache: Cache, spec: KVSpec) -> None:
    # The hold takes as much as fits, so another pin has to be in the way.
    pinned, chain = make_chain(spec, 50, 1), make_chain(spec, 40, 2)
    store(cache, spec, pinned)
    assert cache.pin(pinned, LONG_S).blocks == 50
    say(cache, spec, chain, "chat")
    assert cache.pause_session(spec.namespace, "chat", 5.0) == 0
    assert cache.stats()["leases"]["pin"] == 1
    assert cache.unpin(pinned) == 50
    assert cache.pause_session(spec.namespace, "chat", 0.05) == 40
    wait_until(lambda: not cache.stats()["leases"]["pin"])


def test_a_pin_holds_until_it_is_taken_back(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    store(cache, spec, chain)
    assert cache.pin(chain, LONG_S) == Pinned(20, 20 * BLOCK_BYTES)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 1))
    assert in_memory(cache, chain) == 20
    with peer.acquire(chain, wait_s=0.0) as read:
        assert_intact(read, spec, chain)
    assert peer.unpin(chain) == 20
    assert peer.unpin(chain) == 0
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 2))
    assert in_memory(cache, chain) == 0


def test_a_pin_ends_by_itself(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    expired = cache.stats()["counters"]["expired_leases"].get("pin", 0)
    cache.pin(chain, 0.05)
    wait_until(lambda: not cache.stats()["leases"]["pin"])
    assert cache.stats()["counters"]["expired_leases"]["pin"] == expired + 1
    assert cache.unpin(chain) == 0


def test_a_pin_of_the_same_chain_is_replaced(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 40)
    store(cache, spec, head(chain, 10))
    assert cache.pin(chain, 0.2).blocks == 10
    store(cache, spec, chain)
    assert cache.pin(chain, LONG_S).blocks == 40
    assert cache.pin(chain, LONG_S).blocks == 40  # counted once: three times would be too much
    assert cache.stats()["leases"]["pin"] == 1
    other = make_chain(spec, 5, 1)
    store(cache, spec, other)
    assert cache.pin(other, 0.05).blocks == 5
    wait_until(lambda: cache.stats()["leases"]["pin"] == 1)
    assert cache.unpin(chain) == 40


def test_no_more_than_half_is_pinned(cache: Cache, spec: KVSpec) -> None:
    one, two = make_chain(spec, 60, 1), make_chain(spec, 10, 2)
    store(cache, spec, one)
    store(cache, spec, two)
    assert cache.pin(one, LONG_S).blocks == 60
    with pytest.raises(LimitExceeded) as raised:
        cache.pin(two, LONG_S)
    assert raised.value.remedy
    assert cache.stats()["leases"]["pin"] == 1
    assert cache.unpin(two) == 0
    assert cache.pin(head(two, 4), LONG_S).blocks == 4
    assert (cache.unpin(one), cache.unpin(head(two, 4))) == (60, 4)
    assert cache.pin(two, LONG_S).blocks == 10
    assert cache.unpin(two) == 10


def test_a_pin_that_cannot_be_replaced_stays(cache: Cache, spec: KVSpec) -> None:
    growing, other = make_chain(spec, 60, 1), make_chain(spec, 40, 2)
    store(cache, spec, head(growing, 20))
    store(cache, spec, other)
    try:
        assert (cache.pin(other, LONG_S).blocks, cache.pin(growing, LONG_S).blocks) == (40, 20)
        store(cache, spec, growing)
        with pytest.raises(LimitExceeded):
            cache.pin(growing, LONG_S)
        assert cache.unpin(growing) == 20
    finally:
        cache.unpin(other)


def test_a_refused_pin_loads_nothing(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain, pinned = make_chain(spec, 30, 1), make_chain(spec, 50, 2)
    store(embedded, spec, chain)
    embedded.flush()
    store_far(embedded, spec, make_chain(spec, 2 * WHOLE, 3))
    store(embedded, spec, pinned)
    assert embedded.pin(pinned, LONG_S).blocks == 50
    reads = HeldReads(monkeypatch, embedded)
    try:
        with pytest.raises(LimitExceeded):
            embedded.pin(chain, LONG_S)
        assert embedded.stats()["loads"] == {"queued": 0, "waiting_bytes": 0, "running_bytes": 0}
    finally:
        reads.open()


def test_of_a_long_chain_the_head_is_pinned(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 100)
    store(cache, spec, chain)
    assert cache.pin(chain, LONG_S) == Pinned(WHOLE // 2, WHOLE // 2 * BLOCK_BYTES)
    assert cache.unpin(chain) == WHOLE // 2


def test_a_pin_of_nothing_is_none(cache: Cache, spec: KVSpec) -> None:
    assert cache.pin(make_chain(spec, 4), LONG_S) == Pinned(0, 0)
    assert cache.stats()["leases"]["pin"] == 0
    with pytest.raises(NotFound):
        cache.pin(make_chain(make_spec(), 1), LONG_S)


def test_the_name_of_a_session_is_bounded(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 1)
    say(cache, spec, chain, "s" * 128)
    assert cache.end_session(spec.namespace, "s" * 128) == 1
    for ask in (
        lambda: cache.acquire(chain, session="s" * 129),
        lambda: cache.reserve(chain, session="s" * 129),
        lambda: cache.end_session(spec.namespace, "s" * 129),
    ):
        with pytest.raises(InvalidRequest):
            ask()


def test_a_pin_brings_cold_blocks_in(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    store(cache, spec, chain)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 1))
    assert in_memory(cache, chain) == 0
    assert cache.pin(chain, LONG_S) == Pinned(20, 20 * BLOCK_BYTES)
    wait_until(lambda: in_memory(peer, chain) == 20)
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 2))
    assert in_memory(cache, chain) == 20
    with peer.acquire(chain, wait_s=0.0) as read:
        assert_intact(read, spec, chain)
    assert cache.unpin(chain) == 20


def test_a_pinned_block_can_be_deleted(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    cache.pin(chain, LONG_S)
    assert cache.delete(chain) == 1
    assert cache.lookup(chain).blocks == 3
    assert cache.unpin(chain) == 4
    assert store(cache, spec, chain) == 1


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedCache]:
    tiers = {"warm": {"capacity": "1MiB", "directory": str(tmp_path)}, "cold": {"capacity": "32MiB", "codec": "raw"}}
    with tierkv.open({"state_dir": str(tmp_path / "state"), "load_threads": 1, **tiers}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


def paused_out_of_memory(cache: EmbeddedCache, spec: KVSpec, chain: Chain, expected_s: float) -> None:
    cache.register(spec)
    say(cache, spec, chain, "chat")
    assert cache.pause_session(spec.namespace, "chat", expected_s) == 0
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 1))
    assert in_memory(cache, chain) == 0


def test_after_a_long_pause_the_blocks_are_back_in_time(
    embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    chain = make_chain(spec, 10)
    clock, reads = Clock(monkeypatch, embedded), HeldReads(monkeypatch, embedded)
    reads.open()
    paused_out_of_memory(embedded, spec, chain, 1000.0)
    assert embedded.stats()["leases"]["pin"] == 0
    clock.advance(1000.0 - hints.PREFETCH_LEAD_S - 60.0)
    store(embedded, spec, make_chain(spec, 4, 2))
    assert not reads.begun
    clock.advance(61.0)
    wait_until(lambda: in_memory(embedded, chain) == 10)
    with embedded.acquire(chain, wait_s=0.0, session="chat") as read:
        assert read.tokens_by_tier == {"cold": 10 * BLOCK_TOKENS}
        assert_intact(read, spec, chain)
    wait_until(lambda: nothing_is_held(embedded))


def test_who_is_back_early_or_gone_is_not_prefetched(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, other = make_spec(), make_spec()
    embedded.register(other)
    chain, gone = make_chain(spec, 10), make_chain(spec, 10, 7)
    clock, reads = Clock(monkeypatch, embedded), HeldReads(monkeypatch, embedded)
    reads.open()
    paused_out_of_memory(embedded, spec, chain, 1000.0)
    say(embedded, spec, head(chain, 2), "chat")
    say(embedded, spec, gone, "gone")
    embedded.pause_session(spec.namespace, "gone", 1000.0)
    embedded.end_session(spec.namespace, "gone")
    last = make_chain(other, 3)
    say(embedded, other, last, "last")
    embedded.pause_session(other.namespace, "last", 1000.5)
    embedded.flush()
    store_far(embedded, spec, make_chain(spec, 2 * WHOLE, 2))
    reads.begun.clear()
    clock.advance(1000.0)
    wait_until(lambda: in_memory(embedded, last) == 3)  # due after the others, whose turn is over then
    assert set(reads.order(last)) == {(0, index, 0) for index in range(3)}


def test_a_hold_lasts_longer_than_the_pause_was_to_be(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain = make_chain(spec, 10)
    clock = Clock(monkeypatch, embedded)
    say(embedded, spec, chain, "chat")
    assert embedded.pause_session(spec.namespace, "chat", hints.HOLD_S) == 10
    clock.advance(1.1 * hints.HOLD_S)
    embedded.flush()
    store_far(embedded, spec, make_chain(spec, 2 * WHOLE, 1))
    assert in_memory(embedded, chain) == 10
    clock.advance(hints.HOLD_S)
    wait_until(lambda: not embedded.stats()["leases"]["pin"])
    store_far(embedded, spec, make_chain(spec, 2 * WHOLE, 2))
    assert in_memory(embedded, chain) == 0


def test_the_sessions_remembered_are_bounded(tmp_path: Path) -> None:
    warm = {"capacity": "1MiB", "directory": str(tmp_path)}
    with tierkv.open({"warm": warm, "limits": {"sessions": 3}}) as cache:
        spec = make_spec()
        cache.register(spec)
        for n in range(5):
            say(cache, spec, make_chain(spec, 2, n), f"chat-{n}")
        assert cache.stats()["sessions"] == 3
        assert [cache.end_session(spec.namespace, f"chat-{n}") for n in range(5)] == [0, 0, 2, 2, 2]
