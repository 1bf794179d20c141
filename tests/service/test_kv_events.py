"""What routers are told over ZeroMQ: every block where it is, in vLLM's form, also to those who come late."""

from __future__ import annotations

import asyncio
import random
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierkv
from tests.servers.process import free_port
from tests.service.daemon import PATIENCE_S, SPEC, Daemon, chain, read_back, running, short_directory, store
from tierkv.cache import Chain
from tierkv.config import KVEventsConfig, parse_config
from tierkv.core.build import build_engine
from tierkv.core.events import Event, EventLog
from tierkv.service import kv_events
from tierkv.service.kv_events import Mirror
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.tier import NO_PARENT

SMALL = {"warm": {"capacity": "1MiB"}, "cold": {"capacity": "5MiB", "segment": "1MiB"}}
_ASK_MS = 100
Place = tuple[bytes, int, str]  # chain hash, group, medium


class Subscriber:
    """A router's side: keeps what it is told."""

    def __init__(self, endpoint: str, replay: str, topic: str = "") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay = replay
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(endpoint)
        self.last = -1
        self.places: set[Place] = set()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> list[dict[str, Any]]:
        """Take the next batch, after those that were missed before it; where none comes, ask whether one was missed."""
        if not self.socket.poll(_ASK_MS):
            return [event for number, batch in self.replayed(self.last + 1) for event in self._take(number, batch)]
        _, sequence, payload = self.socket.recv_multipart()
        number = int.from_bytes(sequence, "big")
        events = []
        if number > self.last + 1:
            for missed, batch in self.replayed(self.last + 1):
                if missed < number:
                    events += self._take(missed, batch)
        return events + (self._take(number, payload) if number > self.last else [])

    def replayed(self, start: int) -> list[tuple[int, bytes]]:
        """Ask for all batches that are kept from a number on."""
        asking = self._context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        asking.connect(self._replay)
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        batches = []
        while True:
            _, topic, sequence, payload = asking.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                assert (topic, payload) == (b"", b"")
                asking.close(linger=0)
                return batches
            batches.append((number, payload))

    def until_told(self, places: set[Place]) -> None:
        """Take batches until what is told is so."""
        deadline = time.monotonic() + PATIENCE_S
        while self.places != places:
            assert time.monotonic() < deadline, "it was not told in time"
            self.receive()

    def _take(self, number: int, payload: bytes) -> list[dict[str, Any]]:
        at, events, rank = msgpack.unpackb(payload)
        assert isinstance(at, float)
        assert rank == 0
        assert number == self.last + 1
        self.last = number
        for event in events:
            apply(self.places, event)
        found: list[dict[str, Any]] = events
        return found


def apply(places: set[Place], event: Mapping[str, Any]) -> None:
    if event["type"] == "AllBlocksCleared":
        places.clear()
        return
    told = {(block, event["group_idx"], event["medium"]) for block in event["block_hashes"]}
    if event["type"] == "BlockStored":
        assert not told & places, "told twice"
        places |= told
    else:
        assert told <= places, "removed what was never there"
        places -= told


@contextmanager
def publishing(extra: Mapping[str, Any] = SMALL, topic: str = "") -> Iterator[tuple[Daemon, str, str]]:
    with short_directory() as directory:
        endpoint, replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        told = {"endpoint": endpoint, "replay": replay, "topic": topic}
        with running({**extra, "kv_events": told}) as daemon:
            yield daemon, endpoint, replay
            assert "Traceback" not in daemon.log


@pytest.fixture
def published() -> Iterator[tuple[Daemon, Subscriber]]:
    with publishing() as (daemon, endpoint, replay):
        subscriber = Subscriber(endpoint, replay)
        try:
            yield daemon, subscriber
        finally:
            subscriber.close()


def at(of: Chain, medium: str, start: int = 0) -> set[Place]:
    return {(block, 0, medium) for block in of.hashes[start:]}


def test_a_router_knows_where_blocks_are(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    wanted, other = chain(4), chain(2, seed=1)
    with daemon.connect("ann") as cache:
        store(cache, wanted)
        subscriber.until_told(at(wanted, "CPU"))
        cache.flush()
        subscriber.until_told(at(wanted, "CPU") | at(wanted, "STORAGE"))
        cache.delete(wanted)
        left = Chain(wanted.namespace, wanted.hashes[:3])
        subscriber.until_told(at(left, "CPU") | at(left, "STORAGE"))
        store(cache, other)
        subscriber.until_told(at(left, "CPU") | at(left, "STORAGE") | at(other, "CPU"))
        cache.clear(SPEC.namespace)
        subscriber.until_told(set())


def test_a_block_says_what_it_follows_and_how_many_tokens_it_has(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    wanted = chain(5)
    with daemon.connect() as cache:
        store(cache, Chain(wanted.namespace, wanted.hashes[:2]))
        store(cache, wanted, start=2)
        events: list[dict[str, Any]] = []
        while len(subscriber.places) < 5:
            events += subscriber.receive()
    assert events[0] == {"type": "AllBlocksCleared"}
    runs = [event for event in events if event["type"] == "BlockStored"]
    assert [run["parent_block_hash"] for run in runs] == [None, wanted.hashes[1]]
    assert [run["block_hashes"] for run in runs] == [list(wanted.hashes[:2]), list(wanted.hashes[2:])]
    assert {run["block_size"] for run in runs} == {SPEC.block_tokens}
    assert all(run["token_ids"] == [] for run in runs)


def test_a_commit_around_a_block_that_was_there_is_told_in_two_runs(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    wanted = chain(5)
    with daemon.connect() as cache:
        middle = Chain(wanted.namespace, wanted.hashes[2:3])
        store(cache, middle)
        store(cache, wanted)
        events: list[dict[str, Any]] = []
        while len(subscriber.places) < 5:
            events += subscriber.receive()
    runs = [(event["parent_block_hash"], event["block_hashes"]) for event in events if event["type"] == "BlockStored"]
    assert runs[1:] == [(None, list(wanted.hashes[:2])), (wanted.hashes[2], list(wanted.hashes[3:]))]


def test_who_comes_late_asks_for_what_was_before(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    wanted = chain(3)
    with daemon.connect() as cache:
        store(cache, wanted)
        subscriber.until_told(at(wanted, "CPU"))
        batches = subscriber.replayed(0)
        assert [number for number, _ in batches] == list(range(subscriber.last + 1))
        places: set[Place] = set()
        for _, payload in batches:
            for event in msgpack.unpackb(payload)[1]:
                apply(places, event)
        assert places == at(wanted, "CPU")
        assert subscriber.replayed(subscriber.last + 1) == []


def test_nonsense_is_not_answered_and_ends_nothing(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    with daemon.connect() as cache:
        store(cache, chain(1))
        subscriber.until_told(at(chain(1), "CPU"))
    asking = subscriber._context.socket(zmq.DEALER)
    asking.connect(subscriber._replay)
    for nonsense in ((b"",), (b"", b"12"), (b"", b"1" * 8, b"more")):
        asking.send_multipart(nonsense)
    assert len(subscriber.replayed(0)) == subscriber.last + 1
    assert asking.poll(0) == 0


def test_messages_begin_with_the_topic() -> None:
    with publishing(topic="kv@pod@model") as (daemon, endpoint, replay), daemon.connect() as cache:
        subscriber = Subscriber(endpoint, replay, topic="kv@pod@")
        other = Subscriber(endpoint, replay, topic="kv@another@")
        for seed in count():  # what was sent before the daemon knew of a subscription is not for it
            store(cache, chain(1, seed=seed))
            if subscriber.socket.poll(_ASK_MS):
                break
        assert subscriber.socket.recv_multipart()[0] == b"kv@pod@model"
        assert other.socket.poll(0) == 0
        for each in (subscriber, other):
            each.close()


def test_eviction_is_told_tier_by_tier(published: tuple[Daemon, Subscriber]) -> None:
    daemon, subscriber = published
    with daemon.connect() as cache:
        for seed in range(6):  # of 256 KiB each, through 1 MiB of memory
            store(cache, chain(32, seed=seed))
        cache.flush()
        on_disk = set().union(*(at(chain(32, seed=seed), "STORAGE") for seed in range(6)))
        while {place for place in subscriber.places if place[2] == "STORAGE"} != on_disk:
            subscriber.receive()
        assert len({place for place in subscriber.places if place[2] == "CPU"}) <= 128
        last = chain(32, seed=0)
        assert read_back(cache, last) == 32
        while not at(last, "CPU") <= subscriber.places:
            subscriber.receive()


def test_sockets_of_files_are_for_their_owner_only() -> None:
    with publishing() as (_, endpoint, replay):
        for address in (endpoint, replay):
            assert stat.S_IMODE(Path(address.removeprefix("ipc://")).stat().st_mode) == 0o600


@pytest.mark.parametrize(("endpoint", "warned"), [("tcp://127.0.0.1:*", False), ("tcp://*:*", True)])
def test_an_address_that_others_reach_is_warned_of(endpoint: str, warned: bool) -> None:
    port = free_port()
    with running({**SMALL, "kv_events": {"endpoint": endpoint.replace(":*", f":{port}")}}) as daemon:
        assert ("what all tenants have cached" in daemon.log) == warned


def test_an_address_that_cannot_be_had_stops_the_daemon() -> None:
    with (
        pytest.raises(AssertionError, match=r"kv_events: cannot listen at ipc:///nonexistent"),
        running({**SMALL, "kv_events": {"endpoint": "ipc:///nonexistent/events"}}),
    ):
        pass


def test_without_pyzmq_the_daemon_says_what_to_install() -> None:
    told = {"kv_events": {"endpoint": "ipc:///tmp/never"}}
    with pytest.raises(AssertionError, match=r"tierkv-cache\[events\]"), running({**SMALL, **told}, without="zmq"):
        pass
    with running(SMALL, without="zmq"):
        pass


async def test_a_publisher_that_fell_behind_lets_subscribers_start_over() -> None:
    engine = build_engine(parse_config({"warm": {"capacity": "1MiB"}}))
    engine._state.ledger.events = EventLog(most=8)
    with engine._state.lock:
        for number in range(20):
            engine._state.ledger.events.record("removed", b"", b"", [bytes([number]) * 32], {"reason": "evicted"})
    try:
        with short_directory() as directory:
            addresses = {"endpoint": f"ipc://{directory}/e", "replay": f"ipc://{directory}/r"}
            async with kv_events.publishing(KVEventsConfig(**addresses), engine):
                subscriber = Subscriber(*addresses.values())
                batches = await asyncio.to_thread(subscriber.replayed, 0)
                subscriber.close()
        (_, first), *rest = batches
        assert msgpack.unpackb(first)[1] == [{"type": "AllBlocksCleared"}] * 2
        assert not rest
    finally:
        engine.close()


# The mirror alone, behind a real engine


def test_nothing_is_told_of_the_shared_tier() -> None:
    mirror = Mirror(lambda namespace: 16)
    key, of = bytes(32), {"parent": NO_PARENT, "cause": "checksum"}
    stored = {"hashes": [b"h" * 32], "parents": [NO_PARENT], "depths": [0], "groups": [0], "tiers": ["warm"]}
    assert len(list(mirror.tell(Event(1, 0.0, "stored", b"", b"", (key,), stored)))) == 1
    for kind, details in (("corrupt", {"tier": "shared"}), ("demoted", {"move": "warm>shared"})):
        assert list(mirror.tell(Event(2, 0.0, kind, b"", b"", (key,), {**of, **details}))) == []  # type: ignore[arg-type]
    assert len(mirror) == 1


FULL = KVSpec("model", "weights", "float32", 16, (KVGroup((0, 1), "full", 2, 96),))  # blocks of 48 KiB
WINDOWED = KVSpec(
    "model", "weights", "float32", 16, (KVGroup((0,), "full", 2, 96), KVGroup((1,), "sliding_window", 2, 96, 32))
)
NOISE = random.Random(0).randbytes(FULL.layout().nbytes)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "read", "delete", "flush", "clear", "forget"]),
        st.integers(0, 5),
        st.integers(1, 24),
    ),
    max_size=12,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.sampled_from([FULL, WINDOWED]))
def test_what_is_told_adds_up_to_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]], spec: KVSpec
) -> None:
    home = tmp_path_factory.mktemp("state")
    tiers = {"warm": {"capacity": "1MiB", "directory": str(home)}, "cold": {"capacity": "6MiB", "segment": "1MiB"}}
    mirror = Mirror(lambda _: spec.block_tokens)
    places: set[Place] = set()
    with tierkv.open({"state_dir": str(home / "s"), **tiers}) as cache:
        engine = cache.engine  # type: ignore[attr-defined]
        cache.register(spec)
        position = 0
        for what, seed, blocks in operations:
            wanted = chain(blocks, seed=seed, spec=spec)
            if what == "store":
                with cache.reserve(wanted) as write:
                    for grant in write.granted:
                        write.buffer(grant.index, grant.group)[:] = NOISE[: grant.length]
                    write.commit()
            elif what == "read":
                cache.acquire(wanted).release()
            elif what == "delete":
                cache.delete(wanted)
            elif what == "clear":
                cache.clear(spec.namespace)
            elif what == "flush":
                cache.flush()
            else:
                apply(places, mirror.clear())
                with engine._state.lock:
                    engine._state.ledger.events = EventLog()
                position = 0
                cache.clear(spec.namespace)
            events, missed = engine.events_since(position, 1 << 20)
            assert not missed
            for event in events:
                position = event.sequence
                for told in mirror.tell(event):
                    apply(places, told)
        cache.flush()
        events, _ = engine.events_since(position, 1 << 20)
        for event in events:
            for told in mirror.tell(event):
                apply(places, told)
        assert places == _truth(engine, spec)
        assert len(mirror) == len({place[:2] for place in places})


def _truth(engine: Any, spec: KVSpec) -> set[Place]:
    """Where the blocks of these tests' chains are."""
    tenant = engine.tenant("default")
    media = {"hot": "GPU", "warm": "CPU", "cold": "STORAGE"}
    found = set()
    with engine._state.lock:
        for seed in range(6):
            for block in chain(24, seed=seed, spec=spec).hashes:
                for group in range(len(spec.groups)):
                    levels = engine._state.index.levels(tenant.block_key(block, group))
                    found |= {
                        (block, group, media[name])
                        for level, name in enumerate(engine.placement.names)
                        if levels >> level & 1
                    }
    return found
