"""What the shared tier does beyond the contract of every tier, against a real engine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.tier_suite import block, key_of, meta_of, read
from tests.servers.redis import RedisServer
from tests.storage.shared.conftest import MakeBackend
from tests.storage.shared.support import NAMESPACE, TENANT, Between, fresh_prefix, keys, of_area, open_store, put
from tierkv.errors import (
    BodyMismatch,
    ConfigError,
    CorruptBlock,
    InvalidRequest,
    NotFound,
    SpecMismatch,
    TierKVError,
)
from tierkv.spec import BlockLayout
from tierkv.storage.cold import ColdTier
from tierkv.storage.container import pack, peek, unpack_into
from tierkv.storage.shared import SharedStore, SharedTier, make_backend
from tierkv.storage.tier import BlockMeta, SupportsContainers, checksum

ROOT = Path(__file__).parents[3]
LAYOUT = BlockLayout("bfloat16", (2, 2, 16, 2, 64), 2)


class Narrow(Between):
    """A backend that is best asked for few names at once."""

    probe_width = 4


@pytest.fixture
def tier(store: SharedStore) -> SharedTier:
    return store.area(TENANT, NAMESPACE)


@pytest.fixture(scope="module")
def narrow(redis: RedisServer) -> Iterator[tuple[SharedTier, Narrow]]:
    backend = Narrow(make_backend(redis.url))
    store = open_store(backend)
    yield store.area(TENANT, NAMESPACE), backend
    store.close()


def kv(seed: int) -> bytes:
    """A block that looks like KV, as bfloat16."""
    values = np.random.default_rng(seed).standard_normal(LAYOUT.shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_held_answers_for_each_key_in_one_round_trip(narrow: tuple[SharedTier, Narrow]) -> None:
    tier, backend = narrow
    put(tier, *range(0, 20, 2))
    backend.asked.clear()
    assert tier.held(keys(range(4))) == [True, False, True, False]
    assert backend.asked == [("present", 4)]
    assert tier.held(keys(range(20))) == [number % 2 == 0 for number in range(20)]
    assert [many for _, many in backend.asked[1:]] == [4] * 5
    assert tier.held([]) == []


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(total=st.integers(0, 400), stored=st.integers(0, 400))
def test_holds_finds_the_end_of_a_long_prefix_in_a_few_round_trips(
    narrow: tuple[SharedTier, Narrow], total: int, stored: int
) -> None:
    tier, backend = narrow
    stored = min(stored, total)
    wanted = [key_of(10**6 + number) for number in range(400)]
    have = tier.held(wanted)
    payload = bytes(8)
    grow = [key for key, there in zip(wanted[:stored], have, strict=False) if not there]
    assert not any(tier.put_many([(key, payload, of_area(tier, payload)) for key in grow]))
    for key, there in zip(wanted[stored:], have[stored:], strict=True):
        if there:
            tier.delete(key)
    backend.asked.clear()
    assert tier.holds(wanted[:total]) == stored
    assert {what for what, _ in backend.asked} <= {"present"}
    assert all(many <= 4 for _, many in backend.asked)
    assert len(backend.asked) <= 5  # 5 ** 4 > 400


def test_put_many_asks_once_and_sends_what_is_missing(narrow: tuple[SharedTier, Narrow]) -> None:
    tier, backend = narrow
    numbers = range(500, 504)
    put(tier, *numbers[:2])
    backend.asked.clear()
    put(tier, *numbers, numbers[3])
    assert [what for what, _ in backend.asked if what == "put"] == ["put"] * 2
    assert sum(what == "present" for what, _ in backend.asked) == 2  # five keys, four at a time
    assert tier.held(keys(numbers)) == [True] * 4


def test_what_is_known_to_be_missing_is_not_asked_for(narrow: tuple[SharedTier, Narrow]) -> None:
    tier, backend = narrow
    payload = kv(600)
    container = bytes(pack(payload, LAYOUT, "bx1", checksum(payload)))
    meta = of_area(tier, payload, layout=LAYOUT)
    tier.meta(key_of(600))  # what it asks once for an area
    backend.asked.clear()
    assert tier.put_many([(key_of(600), payload, meta)] * 2, missing=True) == [None] * 2
    assert tier.put_containers([(key_of(601), container, meta)], missing=True) == [None]
    assert [what for what, _ in backend.asked] == ["put"] * 2
    assert tier.held(keys([600, 601])) == [True] * 2


@pytest.mark.parametrize("threads", [1, 3])
def test_many_blocks_are_told_of_one_by_one_on_the_calling_thread(engine: MakeBackend, threads: int) -> None:
    store = open_store(engine(), encode_threads=threads, in_flight=3)
    tier = store.area(TENANT, NAMESPACE)
    told: dict[int, object] = {}

    def done(index: int, outcome: object) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert index not in told
        told[index] = outcome

    payloads = [kv(number) for number in range(20)]
    items = [(key_of(at), payload, of_area(tier, payload, layout=LAYOUT)) for at, payload in enumerate(payloads)]
    items[7] = (key_of(7), payloads[7], items[7][2]._replace(checksum=1))
    items[9] = (key_of(9), payloads[9][:-1], items[9][2])
    outcomes = tier.put_many(items, done)
    assert [told[index] for index in range(20)] == outcomes
    assert [index for index, outcome in enumerate(outcomes) if outcome is not None] == [7, 9]
    assert isinstance(outcomes[7], CorruptBlock)
    assert isinstance(outcomes[9], BodyMismatch)
    told.clear()
    out = [memoryview(bytearray(len(payload))) for payload in payloads]
    out[4] = out[4][:-1]
    found = tier.read_many(list(zip(keys(range(20)), out, strict=True)), done)
    assert [told[index] for index in range(20)] == found
    wrong = {index: type(outcome) for index, outcome in enumerate(found) if isinstance(outcome, TierKVError)}
    assert wrong == {4: BodyMismatch, 7: NotFound, 9: NotFound}
    for index in set(range(20)) - set(wrong):
        assert found[index] == items[index][2]._replace(layout=None)
        assert bytes(out[index]) == payloads[index]
    store.close()


def test_a_block_is_stored_as_its_meta_wants_it(store: SharedStore) -> None:
    tier = store.area(TENANT, NAMESPACE)
    payload = kv(1)
    for number, codec in enumerate(["", "raw", "eq3"]):
        meta = of_area(tier, payload, layout=LAYOUT, codec=codec)
        tier.put(key_of(number), payload, meta)
        container, stored = tier.read_container(key_of(number))
        assert peek(container).codec == (codec or "bx1")
        out = bytearray(len(payload))
        assert tier.read_into(key_of(number), memoryview(out)) == stored
        assert stored.checksum == checksum(out)
        assert (bytes(out) == payload) == (codec != "eq3")


def test_a_container_goes_from_the_disk_to_another_node_uncoded(redis: RedisServer, tmp_path: Path) -> None:
    prefix = fresh_prefix()
    ann, bob = open_store(redis.url, prefix=prefix), open_store(redis.url, prefix=prefix)
    payload = kv(3)
    meta = meta_of(payload, tenant=TENANT, namespace=NAMESPACE, parent=key_of(8), depth=4, layout=LAYOUT)
    cold = ColdTier(tmp_path / "cold", capacity_bytes=8 << 20, segment_bytes=2 << 20, sync="none")
    assert isinstance(cold, SupportsContainers)
    cold.put(key_of(1), payload, meta)
    container, known = cold.read_container(key_of(1))
    with pytest.raises(NotFound):
        cold.read_container(key_of(2))
    ann.area(TENANT, NAMESPACE).put_container(key_of(1), container, known)
    tier = bob.area(TENANT, NAMESPACE)
    assert isinstance(tier, SupportsContainers)
    again, told = tier.read_container(key_of(1))
    assert bytes(again) == container
    assert told == known == meta._replace(layout=None)
    out = bytearray(len(payload))
    unpack_into(again, memoryview(out))
    assert out == payload
    assert read(tier, key_of(1)) == payload
    for close in (cold, ann, bob):
        close.close()


def test_a_container_that_is_not_the_announced_one_is_refused(tier: SharedTier) -> None:
    payload = kv(1)
    meta = of_area(tier, payload)
    container = bytes(pack(payload, LAYOUT, "bx1", meta.checksum))
    outcomes = tier.put_containers(
        [
            (key_of(1), container, meta._replace(checksum=1)),
            (key_of(2), container, meta._replace(length=1)),
            (key_of(3), container[:-1], meta),
            (key_of(4), b"no container", meta),
            (key_of(5), container, meta),
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [CorruptBlock] * 4 + [type(None)]
    assert tier.held(keys(range(1, 6))) == [False] * 4 + [True]


def test_areas_do_not_see_each_other(store: SharedStore) -> None:
    ann, bob = store.area(b"tenant-1", NAMESPACE), store.area(b"tenant-2", NAMESPACE)
    other = store.area(b"tenant-1", key_of(1))
    put(ann, 1)
    assert [area.has(key_of(1)) for area in (ann, bob, other)] == [True, False, False]
    bob.clear()
    other.clear()
    assert ann.has(key_of(1))
    payload = block(1, 10)
    with pytest.raises(SpecMismatch):
        bob.put(key_of(1), payload, of_area(ann, payload))
    assert store.area(b"tenant-1", NAMESPACE) is ann
    with pytest.raises(InvalidRequest):
        store.area(b"short", NAMESPACE)


def test_stores_with_other_prefixes_do_not_see_each_other(redis: RedisServer, tier: SharedTier) -> None:
    put(tier, 1)
    other = open_store(redis.url)
    assert not other.area(TENANT, NAMESPACE).has(key_of(1))
    other.close()


def test_one_node_at_a_time_makes_a_block(redis: RedisServer) -> None:
    prefix = fresh_prefix()
    ann, bob = (open_store(redis.url, prefix=prefix).area(TENANT, NAMESPACE) for _ in range(2))
    assert ann.claim(key_of(1), 60.0) is True
    assert bob.claim(key_of(1), 60.0) is False
    assert bob.claim(key_of(2), 60.0) is True
    assert ann.claim(key_of(1), 60.0) is True
    bob.unclaim(key_of(1))
    assert bob.claim(key_of(1), 60.0) is False
    ann.unclaim(key_of(1))
    assert bob.claim(key_of(1), 60.0) is True
    for tier in (ann, bob):
        tier._link.close()


def test_says_what_it_has_done(store: SharedStore, tier: SharedTier) -> None:
    put(tier, 1, length=50_000)
    read(tier, key_of(1))
    told = store.describe()
    assert told["kind"] == "valkey"
    assert told["state"] == "closed"
    assert (told["calls"]["put"], told["calls"]["get"]) == (1, 1)
    assert told["bytes_in"] == told["bytes_out"] > 50_000
    assert told["used_bytes"] > 0
    assert told["failures"] == {}
    assert store.check().used_bytes > 0
    usage = tier.survey()
    assert (usage.blocks, usage.payload_bytes) == (1, 50_000)
    assert tier.usage().blocks == 0


@pytest.mark.parametrize("call", ["put", "has", "meta", "delete", "forget", "claim", "read_into"])
def test_a_key_of_another_length_is_refused(tier: SharedTier, call: str) -> None:
    calls: dict[str, Callable[[bytes], object]] = {
        "put": lambda key: tier.put(key, b"", of_area(tier, b"")),
        "has": tier.has,
        "meta": tier.meta,
        "delete": tier.delete,
        "forget": lambda key: tier.forget([key]),
        "claim": lambda key: tier.claim(key, 1.0),
        "read_into": lambda key: tier.read_into(key, memoryview(bytearray(10))),
    }
    with pytest.raises(InvalidRequest):
        calls[call](b"short")


@pytest.mark.parametrize(
    "settings",
    [
        {"in_flight": 0},
        {"probe_timeout_s": 0.0},
        {"transfer_timeout_s": -1.0},
        {"hedge_s": 0.0},
        {"encode_threads": 0},
        {"codec": "zip"},
        {"prefix": "a b"},
        {"prefix": "/a"},
        {"prefix": "a" * 65},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SharedStore(make_backend("valkey://localhost"), **settings)  # type: ignore[arg-type]


def test_client_libraries_are_loaded_when_they_are_used(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(glide=None, obstore=None)\n"
        "from tierkv.errors import ConfigError\n"
        "from tierkv.storage.shared import SharedStore, make_backend\n"
        "for url in ('valkey://localhost', 's3://bucket'):\n"
        "    store = SharedStore(make_backend(url))\n"
        "    try:\n"
        "        store.open()\n"
        "    except ConfigError as error:\n"
        "        print(error.remedy)\n"
        "    store.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["pip install 'tierkv-cache[shared]'"] * 2, done.stderr


def test_the_meta_of_a_block_says_all_but_how_it_is_coded(tier: SharedTier) -> None:
    payload = kv(1)
    meta = BlockMeta(len(payload), checksum(payload), key_of(4), NAMESPACE, TENANT, 9, 2, LAYOUT, "raw")
    tier.put(key_of(1), payload, meta)
    assert tier.meta(key_of(1)) == meta._replace(layout=None, codec="")
