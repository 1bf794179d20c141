"""What `tierkv.cache` promises to one writer and its readers, the same embedded, over shared memory and over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tierkv.cache import Cache, Chain, Hit, Written
from tierkv.errors import BodyMismatch, ChecksumMismatch, InvalidRequest, LeaseLost, NotFound
from tierkv.handles import LeasedWriter
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.tier import checksum

from .conftest import Deployment
from .support import BLOCK_BYTES, BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, payload, store, write

SETTINGS = {"warm": {"capacity": "32MiB"}, "cold": {"capacity": "64MiB"}}


def used(cache: Cache) -> tuple[int, int]:
    stats = cache.stats()
    return stats["tiers"]["warm"]["used_bytes"], stats["leases"]["write"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "uint8"])
def test_what_is_stored_comes_back_bit_for_bit(cache: Cache, peer: Cache, dtype: str) -> None:
    spec = make_spec(KVGroup((0, 3), "full", 2, 40), dtype=dtype, order="HND")
    cache.register(spec)
    peer.register(spec)
    chain = make_chain(spec, 5)
    assert store(cache, spec, chain) == 5
    assert peer.lookup(chain) == Hit(5, 5 * BLOCK_TOKENS, ("warm",) * 5)
    with peer.acquire(chain) as read:
        assert (read.hit_blocks, read.hit_tokens, read.published_blocks) == (5, 5 * BLOCK_TOKENS, 5)
        assert [ref.index for ref in read.blocks] == [0, 1, 2, 3, 4]
        assert_intact(read, spec, chain)


def test_groups_are_stored_and_found_together(cache: Cache) -> None:
    spec = make_spec(KVGroup((0, 1), "full", 1, 64), KVGroup((2,), "mla", 1, 128))
    cache.register(spec)
    chain = make_chain(spec, 4)
    with cache.reserve(chain) as lease:
        assert [(g.index, g.group) for g in lease.grants] == [(i, g) for i in range(4) for g in (0, 1)]
        write(lease, spec, chain)
        assert lease.commit() == 8
    with cache.acquire(chain) as read:
        assert [(ref.index, ref.group) for ref in read.blocks] == [(i, g) for i in range(4) for g in (0, 1)]
        assert sum(read.tokens_by_tier.values()) == read.hit_tokens == 4 * BLOCK_TOKENS
        assert_intact(read, spec, chain)


def test_a_sliding_window_needs_only_its_window(cache: Cache) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "sliding_window", 1, 64, window=2 * BLOCK_TOKENS))
    cache.register(spec)
    chain = make_chain(spec, 6)
    store(cache, spec, chain)
    with cache.acquire(chain) as read:
        assert [ref.index for ref in read.blocks if ref.group == 0] == [0, 1, 2, 3, 4, 5]
        assert [ref.index for ref in read.blocks if ref.group == 1] == [4, 5]
        assert_intact(read, spec, chain)


def test_looking_changes_nothing(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    store(cache, spec, chain)
    before = cache.stats()
    for _ in range(3):
        assert cache.lookup(chain).blocks == 3
        assert cache.lookup(make_chain(spec, 3, seed=1)).blocks == 0
    after = cache.stats()
    for name in ("counters", "leases", "published_blocks", "dirty_bytes"):
        assert after[name] == before[name]


def test_a_prompt_hits_what_it_shares_with_another(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    longer = Chain(chain.namespace, (*chain.hashes[:2], *make_chain(spec, 3, seed=9).hashes))
    assert cache.lookup(longer).blocks == 2
    with cache.acquire(longer) as read:
        assert_intact(read, spec, chain)


def test_the_caller_can_leave_the_last_block_to_itself(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    with cache.acquire(chain, max_blocks=3) as read:
        assert read.hit_blocks == 3
    with cache.acquire(chain, max_blocks=0) as read:
        assert (read.hit_blocks, read.blocks) == (0, ())


def test_blocks_become_visible_as_they_are_committed(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    with cache.reserve(chain) as lease:
        write(lease, spec, chain)
        for index in range(4):
            assert peer.lookup(chain).blocks == index
            assert lease.commit([index]) == 1
            with peer.acquire(chain) as read:
                assert read.hit_blocks == index + 1
                assert_intact(read, spec, chain)


def test_a_block_is_not_published_before_its_predecessor(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    with cache.reserve(chain) as lease:
        write(lease, spec, chain)
        lease.commit([0, 1])
        lease.commit([3])
        assert peer.lookup(chain).blocks == 2
        assert peer.stats()["counters"]["stored_blocks"] == cache.stats()["counters"]["stored_blocks"]
        lease.commit([2])
        assert peer.lookup(chain).blocks == 4


def test_blocks_of_one_writer_wait_for_those_of_another(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    with cache.reserve(head(chain, 2)) as first:
        with peer.reserve(chain) as second:
            assert [g.state for g in second.grants] == ["busy", "busy", "granted", "granted"]
            write(second, spec, chain)
            assert second.commit() == 2
        assert cache.lookup(chain).blocks == 0
        write(first, spec, chain)
        first.commit([0])
        assert cache.lookup(chain).blocks == 1
        first.commit([1])
        assert cache.lookup(chain).blocks == 4
    with cache.acquire(chain) as read:
        assert_intact(read, spec, chain)
    assert cache.stats()["leases"]["write"] == 0


def test_waiting_blocks_are_published_whoever_stores_the_missing_one(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    with cache.reserve(head(chain, 1)):
        assert store(peer, spec, chain, 1) == 2
    assert cache.lookup(chain).blocks == 0
    assert store(peer, spec, head(chain, 1)) == 1
    assert cache.lookup(chain).blocks == 3
    assert cache.stats()["leases"]["write"] == 0


def test_a_reservation_says_what_is_there_and_what_is_being_written(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, head(chain, 2))
    with cache.reserve(head(chain, 3)) as mine, peer.reserve(chain) as other:
        assert [g.state for g in mine.grants] == ["present", "present", "granted"]
        assert [g.state for g in other.grants] == ["present", "present", "busy", "granted"]
    with cache.reserve(chain, start=1, stop=3) as part:
        assert [(g.index, g.state) for g in part.grants] == [(1, "present"), (2, "granted")]
    with pytest.raises(InvalidRequest):
        cache.reserve(chain, start=3, stop=2)
    with pytest.raises(InvalidRequest):
        cache.reserve(chain, stop=5)


def test_a_lease_on_nothing_is_good_for_nothing_but_harmless(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    store(cache, spec, chain)
    with cache.reserve(chain) as lease:
        assert lease.granted == ()
        assert lease.commit() == 0
        lease.renew(10.0)
    with cache.acquire(make_chain(spec, 2, seed=1)) as read:
        assert (read.hit_blocks, read.blocks, dict(read.tokens_by_tier)) == (0, (), {})
        read.renew(10.0)
        with pytest.raises(InvalidRequest):
            read.view(0)


def test_what_was_not_committed_is_given_back(cache: Cache, spec: KVSpec) -> None:
    before = used(cache)
    chain = make_chain(spec, 8)
    with cache.reserve(chain) as lease:
        assert used(cache) > before
        write(lease, spec, chain, range(3))
        lease.commit([0, 1])
    lease.abort()
    assert cache.lookup(chain).blocks == 2
    assert cache.delete(chain) == 0
    assert cache.delete(head(chain, 2)) == cache.delete(head(chain, 1)) == 1
    assert used(cache) == before


def test_an_error_in_the_writers_context_aborts(cache: Cache, spec: KVSpec) -> None:
    before = used(cache)
    chain = make_chain(spec, 3)
    with contextlib.suppress(ZeroDivisionError), cache.reserve(chain) as lease:
        write(lease, spec, chain)
        raise ZeroDivisionError
    assert cache.lookup(chain).blocks == 0
    assert used(cache) == before


def test_a_block_is_committed_once(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    with cache.reserve(chain) as lease:
        write(lease, spec, chain)
        lease.commit([0])
        for index in (0, 2, -1):
            with pytest.raises(InvalidRequest):
                lease.commit([index])
        with pytest.raises(InvalidRequest):
            lease.buffer(0)
        assert lease.commit() == 1
        assert lease.commit() == 0
    with pytest.raises(LeaseLost):
        lease.commit()
    with pytest.raises(LeaseLost):
        lease.buffer(1)
    with pytest.raises(LeaseLost):
        lease.renew(1.0)


def test_written_blocks_are_what_was_written_last(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    with cache.reserve(chain) as lease:
        assert isinstance(lease, LeasedWriter)
        for index in (2, 0, 1):
            lease.write(index, payload(spec, chain, index))
        lease.write(1, bytes(BLOCK_BYTES))
        lease.buffer(1)[:] = payload(spec, chain, 1)  # after `write` has summed other bytes
        with pytest.raises(BodyMismatch):
            lease.write(0, bytes(BLOCK_BYTES - 1))
        assert lease.commit() == 3
    with cache.acquire(chain) as read:
        assert read.hit_blocks == 3
        assert_intact(read, spec, chain)


def test_a_wrong_checksum_publishes_nothing_and_can_be_repaired(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    with cache.reserve(chain) as lease:
        write(lease, spec, chain)
        written = [Written(i, 0, BLOCK_BYTES, checksum(payload(spec, chain, i)) ^ (i == 1)) for i in range(3)]
        with pytest.raises(ChecksumMismatch):
            lease._plane.commit(lease.id, written)  # type: ignore[attr-defined]
        assert cache.lookup(chain).blocks == 0
        with pytest.raises(InvalidRequest):  # it has lost its slot
            lease._plane.commit(lease.id, written[1:2])  # type: ignore[attr-defined]
        with cache.reserve(chain) as again:
            assert [g.state for g in again.grants] == ["busy", "granted", "busy"]
    assert store(cache, spec, chain) == 3
    with cache.acquire(chain) as read:
        assert_intact(read, spec, chain)


def test_a_commit_of_another_length_is_refused(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 1)
    with cache.reserve(chain) as lease:
        write(lease, spec, chain)
        with pytest.raises((InvalidRequest, BodyMismatch)):
            lease._plane.commit(lease.id, [Written(0, 0, BLOCK_BYTES - 1, 0)])  # type: ignore[attr-defined]
        assert cache.lookup(chain).blocks == 0


def test_reading_into_a_buffer(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 1)
    store(cache, spec, chain)
    with cache.acquire(chain) as read:
        room = bytearray(BLOCK_BYTES + 8)
        read.read_into(0, memoryview(room))
        assert room == payload(spec, chain, 0) + bytes(8)
        with pytest.raises(BodyMismatch):
            read.read_into(0, memoryview(room)[:100])
        with pytest.raises(InvalidRequest):
            read.view(1)
        with pytest.raises(TypeError):
            read.view(0)[0] = 0
    read.release()
    with pytest.raises(LeaseLost):
        read.view(0)
    with pytest.raises(LeaseLost):
        read.renew(1.0)


def test_only_whole_blocks_of_known_namespaces(cache: Cache, spec: KVSpec) -> None:
    assert len(Chain.of(spec, list(range(BLOCK_TOKENS - 1)))) == 0
    empty = Chain(spec.namespace, ())
    assert cache.lookup(empty) == Hit(0, 0, ())
    assert cache.delete(empty) == 0
    stranger = make_chain(make_spec(), 1)
    for call in (cache.lookup, cache.acquire, cache.reserve, cache.prefetch, cache.delete):
        with pytest.raises(NotFound):
            call(stranger)
    with pytest.raises(NotFound):
        cache.clear(stranger.namespace)


def test_a_deleted_block_ends_the_prefix_there(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    assert cache.delete(head(chain, 3)) == 1
    assert cache.delete(head(chain, 3)) == 0
    assert cache.lookup(chain).blocks == 2
    assert store(cache, spec, chain) == 1
    assert cache.lookup(chain).blocks == 4


def test_a_deleted_block_stays_readable_under_its_lease(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    before = used(cache)
    store(cache, spec, chain)
    with cache.acquire(chain) as read:
        assert peer.clear(spec.namespace) == 3
        assert peer.lookup(chain).blocks == 0
        assert store(peer, spec, chain) == 3
        assert_intact(read, spec, chain)
        with peer.acquire(chain) as again:
            assert not {r.offset for r in again.blocks} & {r.offset for r in read.blocks}
            assert peer.clear(spec.namespace) == 3
            assert_intact(again, spec, chain)
        assert_intact(read, spec, chain)
    assert used(cache) == before


def test_clearing_spares_other_namespaces(cache: Cache, spec: KVSpec) -> None:
    other = make_spec()
    cache.register(other)
    for each in (spec, other):
        store(cache, each, make_chain(each, 3))
    cache.flush()
    assert cache.clear(spec.namespace) == 3
    assert cache.clear(spec.namespace) == 0
    assert cache.lookup(make_chain(other, 3)).blocks == 3


def test_tenants_never_meet(deployment: Deployment, cache: Cache, spec: KVSpec) -> None:
    stranger = deployment.connect("stranger")
    stranger.register(spec)
    chain = make_chain(spec, 3)
    store(cache, spec, head(chain, 2))
    assert stranger.lookup(chain).blocks == 0
    with stranger.reserve(chain) as theirs, cache.reserve(chain) as mine, cache.acquire(chain) as read:
        assert [g.state for g in theirs.grants] == ["granted"] * 3
        write(theirs, spec, chain)
        write(mine, spec, chain)
        foreign = theirs._plane  # type: ignore[attr-defined]
        written = [Written(2, 0, BLOCK_BYTES, checksum(payload(spec, chain, 2)))]
        calls: list[Callable[[], object]] = [
            lambda: foreign.commit(mine.id, written),
            lambda: foreign.abort(mine.id),
            lambda: foreign.renew(mine.id, 5.0),
            lambda: foreign.renew(read.id, 5.0),
            lambda: foreign.release(read.id, [(0, 0)]),
        ]
        for call in calls:
            with pytest.raises(LeaseLost):
                call()
        ticket, other = cache.prefetch(chain), stranger.prefetch(chain)
        other.id = ticket.id
        for ask in (other.progress, other.cancel):
            with pytest.raises(NotFound):
                ask()
        assert mine.commit() == 1
        assert_intact(read, spec, chain)
        assert stranger.lookup(chain).blocks == 0
        assert theirs.commit() == 3
    assert stranger.clear(spec.namespace) == 3
    assert cache.lookup(chain).blocks == 3
