"""Two things at one moment, made certain by gates in real components."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.cache import Written
from tierkv.core.acquiring import Acquired, Terms
from tierkv.core.engine import Engine
from tierkv.core.steps import Step, run_async
from tierkv.embedded import EmbeddedCache
from tierkv.errors import InvalidRequest, StorageError
from tierkv.storage.tier import Tier, checksum

from .support import assert_intact, head, make_chain, make_spec, payload, store, store_far, wait_until, write

SPEC = make_spec()


class Gate:
    """Holds everybody who passes a method of an object until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        method: Callable[..., Any] = getattr(owner, name)

        def gated(*args: Any, **named: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(30.0)
            return method(*args, **named)

        monkeypatch.setattr(owner, name, gated)

    def open(self) -> None:
        self.opened.set()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[EmbeddedCache]:
    tiers = {"warm": {"capacity": "1MiB", "directory": str(tmp_path), "policy": "lru"}, "cold": {"capacity": "32MiB"}}
    with tierkv.open({"state_dir": str(tmp_path / "state"), **tiers}) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(SPEC)
        yield cache


def cold_of(cache: EmbeddedCache) -> Tier:
    cold = cache.engine.placement.cold
    assert cold is not None
    return cold


def push_out(cache: EmbeddedCache) -> None:
    cache.flush()
    store_far(cache, SPEC, make_chain(SPEC, 160, seed=99))


def nothing_is_held(engine: Engine) -> bool:
    state = engine._state
    with state.lock:
        idle = not engine._loader._running and not any(entry.pins for entry in state.index)
        return idle and not state.writing and state.leases.counts() == {"read": 0, "write": 0, "compute": 0, "pin": 0}


def acquire_step(cache: EmbeddedCache, blocks: int) -> Step[Acquired]:
    return cache.engine.reader.acquire(
        cache.engine.tenant("default"),
        SPEC.namespace,
        make_chain(SPEC, blocks).hashes,
        Terms(frozenset({"warm"}), 30.0, 30.0),
    )


def test_a_block_stored_anew_outlives_the_deletion_of_the_old_one(
    cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(SPEC, 1)
    with cache.reserve(chain) as lease:
        lease.buffer(0)[:] = bytes(SPEC.layout().nbytes)  # other bytes than the second time
        lease.commit()
    cache.flush()
    gate = Gate(monkeypatch, cold_of(cache), "delete")
    deleting = threading.Thread(target=cache.delete, args=(chain,))
    deleting.start()
    assert gate.reached.wait(30.0)
    assert cache.lookup(chain).blocks == 0
    store(cache, SPEC, chain)
    cache.flush()
    gate.open()
    deleting.join(30.0)
    push_out(cache)
    with cache.acquire(chain, wait_s=20.0) as read:
        assert read.tokens_by_tier == {"cold": SPEC.block_tokens}
        assert_intact(read, SPEC, chain)


def test_old_bytes_left_in_the_cold_tier_are_replaced(cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(SPEC, 1)
    with cache.reserve(chain) as lease:
        lease.buffer(0)[:] = bytes(SPEC.layout().nbytes)
        lease.commit()
    cache.flush()

    def refuse(key: bytes) -> bool:
        raise StorageError("the disk refuses")

    with monkeypatch.context() as patched:
        patched.setattr(cold_of(cache), "delete", refuse)
        with pytest.raises(StorageError):
            cache.delete(chain)
    store(cache, SPEC, chain)
    cache.flush()
    push_out(cache)
    with cache.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 1
        assert_intact(read, SPEC, chain)


def test_an_abandoned_acquire_holds_nothing(cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    store(cache, SPEC, make_chain(SPEC, 8))
    push_out(cache)
    gate = Gate(monkeypatch, cold_of(cache), "read_into")
    step = acquire_step(cache, 8)
    next(step)
    assert gate.reached.wait(30.0)
    step.close()
    gate.open()
    wait_until(lambda: nothing_is_held(cache.engine))
    with cache.acquire(make_chain(SPEC, 8), wait_s=20.0) as read:
        assert read.hit_blocks == 8


async def test_a_cancelled_task_spoils_nothing_for_others(
    cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, SPEC, make_chain(SPEC, 4))
    push_out(cache)
    gate = Gate(monkeypatch, cold_of(cache), "read_into")
    first = asyncio.ensure_future(run_async(acquire_step(cache, 4)))
    second = asyncio.ensure_future(run_async(acquire_step(cache, 4)))
    await asyncio.to_thread(gate.reached.wait, 30.0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    acquired = await second
    assert acquired.hit_blocks == 4
    cache.engine.release(cache.engine.tenant("default"), acquired.id)
    wait_until(lambda: nothing_is_held(cache.engine))


def test_an_abandoned_reservation_holds_nothing(cache: EmbeddedCache) -> None:
    everything = make_chain(SPEC, 128)
    store(cache, SPEC, head(everything, 100))
    with cache.acquire(head(everything, 100)):
        step = cache.engine.writer.reserve(
            cache.engine.tenant("default"),
            SPEC.namespace,
            make_chain(SPEC, 60, seed=1).hashes,
            start=0,
            stop=None,
            wait_s=600.0,
            ttl_s=30.0,
            tiers=frozenset({"warm"}),
        )
        next(step)
        assert cache.engine._state.writing
        step.close()
    wait_until(lambda: nothing_is_held(cache.engine))
    assert store(cache, SPEC, make_chain(SPEC, 60, seed=1)) == 60


def test_a_block_deleted_while_it_sinks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    tiers = {"hot": {"capacity": "1MiB", "device": "cpu"}, "warm": {"capacity": "1MiB", "directory": str(tmp_path)}}
    with tierkv.open(tiers) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(SPEC)
        hot, warm = (memory.tier for memory in cache.engine.placement.memory)
        chain = make_chain(SPEC, 1)
        find = hot.slot

        def delete_then_find(key: bytes) -> Any:
            cache.delete(chain)
            return find(key)

        monkeypatch.setattr(hot, "slot", delete_then_find)
        store(cache, SPEC, chain)
        cache.flush()
        assert cache.lookup(chain).blocks == 0
        assert warm.usage().blocks == hot.usage().blocks == 0
        assert warm.usage().used_bytes == hot.usage().used_bytes == 0


def test_a_lease_that_expires_during_the_commit_publishes_nothing(
    cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(SPEC, 1)
    lease = cache.reserve(chain)
    write(lease, SPEC, chain)
    gate = Gate(monkeypatch, cache.engine.placement.memory[0].tier, "view")
    errors: list[Exception] = []

    def commit() -> None:
        try:
            lease.commit()
        except Exception as error:
            errors.append(error)

    committing = threading.Thread(target=commit)
    committing.start()
    assert gate.reached.wait(30.0)
    cache.engine.renew(cache.engine.tenant("default"), lease.id, 0.0)
    wait_until(lambda: not cache.stats()["leases"]["write"])
    gate.open()
    committing.join(30.0)
    assert [type(error).__name__ for error in errors] == ["LeaseLost"]
    assert cache.lookup(chain).blocks == 0
    assert store(cache, SPEC, chain) == 1


def test_one_block_cannot_be_committed_twice_in_one_call(cache: EmbeddedCache) -> None:
    chain = make_chain(SPEC, 2)
    with cache.reserve(chain) as lease:
        write(lease, SPEC, chain)
        tenant = cache.engine.tenant("default")
        written = [Written(i, 0, SPEC.layout().nbytes, checksum(payload(SPEC, chain, i))) for i in range(2)]
        with pytest.raises(InvalidRequest):
            cache.engine.writer.commit(tenant, lease.id, [written[0], written[0]])
        assert cache.lookup(chain).blocks == 0
        assert cache.engine.writer.commit(tenant, lease.id, written) == 2
    wait_until(lambda: nothing_is_held(cache.engine))


def test_damage_at_the_head_of_the_queue_does_not_stop_a_flush(
    cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.core.demotion.BATCH_BYTES", 1)  # one block a batch
    chains = [make_chain(SPEC, 1, seed) for seed in range(3)]
    for chain in chains:
        store(cache, SPEC, chain)
    with cache.acquire(chains[0]) as read:
        read._plane.view(read.blocks[0])[0] ^= 1  # type: ignore[attr-defined]
    cache.flush()
    assert cache.stats()["dirty_bytes"] == {"warm": 0}
    assert [cache.lookup(chain).blocks for chain in chains] == [0, 1, 1]
    assert cache.stats()["counters"]["corrupt_blocks"] == {"warm/checksum": 1}


def test_a_lease_cannot_end_before_it_was_given(tmp_path: Path) -> None:
    with tierkv.open({"warm": {"capacity": "1MiB", "directory": str(tmp_path)}}) as cache:
        cache.register(SPEC)
        everything, other = make_chain(SPEC, 128), make_chain(SPEC, 4, seed=1)
        store(cache, SPEC, everything)
        with cache.acquire(head(everything, 126)):
            assert cache.delete(everything) == cache.delete(head(everything, 127)) == 1
            # Two blocks find room, and the others wait for longer than the lease is to live.
            with cache.reserve(other, wait_s=1.2, ttl_s=1.0) as lease:
                assert [g.state for g in lease.grants] == ["granted", "granted", "no_room", "no_room"]
                write(lease, SPEC, other)
                assert lease.commit() == 2
        assert cache.stats()["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}
        assert cache.lookup(other).blocks == 2
