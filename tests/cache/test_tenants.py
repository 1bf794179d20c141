"""Tenants: nobody meets another's blocks, scopes share them, quotas and shares hold, and time tells nothing."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tierkv
from tests.service.daemon import Raw, running
from tierkv.cache import Cache, Chain
from tierkv.core import fairness
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LeaseLost, LimitExceeded, NotFound
from tierkv.spec import KVGroup, KVSpec

from .conftest import Deployment
from .control import Clock
from .support import BLOCK_BYTES, BLOCK_TOKENS, head, make_chain, make_spec, store

QUOTA = 1 << 20
SETTINGS = {
    "warm": {"capacity": "16MiB"},
    "cold": {"capacity": "64MiB", "segment": "1MiB", "codec": "raw"},
    "tenants": {
        "carol": {"scope": "team"},
        "dave": {"scope": "team"},
        "erin": {"scope": "others"},
        "small": {"warm": QUOTA},
        "poor": {"cold": QUOTA},
    },
}
OWNERS = {"alice": "alice", "bob": "bob", "carol": "team", "dave": "team", "erin": "others"}


def small_spec() -> KVSpec:
    return make_spec(KVGroup((0,), "full", 1, 8))


def prompts(spec: KVSpec) -> list[Chain]:
    """Two that share their first half, and one that shares nothing."""
    tokens = np.arange(4 * BLOCK_TOKENS)
    parted = np.concatenate([tokens[: 2 * BLOCK_TOKENS], tokens[: 2 * BLOCK_TOKENS] + 10_000])
    return [Chain.of(spec, tokens), Chain.of(spec, parted), Chain.of(spec, tokens + 20_000)]


def bytes_of(owner: str, spec: KVSpec, chain_hash: bytes) -> bytes:
    """What an owner stores for a block: another owner's block would not pass for it."""
    seed = int.from_bytes(chain_hash[:8], "little") + len(owner) * 1000 + ord(owner[0])
    return np.random.default_rng(seed).bytes(spec.layout().nbytes)


class House:
    """Five tenants of one cache in a namespace of its own, and a model of what each may see."""

    def __init__(self, clients: dict[str, Cache]) -> None:
        self.spec = small_spec()
        self.chains = prompts(self.spec)
        self.clients = clients
        self.stored: dict[str, dict[bytes, str]] = {owner: {} for owner in OWNERS.values()}  # hash -> who stored it
        self.talked: set[str] = set()
        for client in clients.values():
            client.register(self.spec)

    def visible(self, tenant: str, chain: Chain) -> int:
        stored = self.stored[OWNERS[tenant]]
        return next((n for n, chain_hash in enumerate(chain.hashes) if chain_hash not in stored), len(chain))

    def store(self, tenant: str, chain: Chain) -> None:
        owner = OWNERS[tenant]
        self.talked.add(tenant)
        with self.clients[tenant].reserve(chain, session="chat") as lease:
            absent = {i for i, chain_hash in enumerate(chain.hashes) if chain_hash not in self.stored[owner]}
            assert {grant.index for grant in lease.granted} == absent
            for grant in lease.granted:
                lease.write(grant.index, bytes_of(owner, self.spec, chain.hashes[grant.index]))
                self.stored[owner][chain.hashes[grant.index]] = tenant
            lease.commit()

    def acquire(self, tenant: str, chain: Chain) -> None:
        with self.clients[tenant].acquire(chain) as read:
            assert read.hit_blocks == read.published_blocks == self.visible(tenant, chain)
            for ref in read.blocks:
                assert bytes(read.view(ref.index)) == bytes_of(OWNERS[tenant], self.spec, chain.hashes[ref.index])

    def read_into(self, tenant: str, chain: Chain) -> None:
        at = len(chain) - 1
        out = bytearray(self.spec.layout().nbytes)
        found = self.clients[tenant].read_into(chain, at, memoryview(out))
        if found:  # a block behind a gap may be found, where no lease is needed
            assert chain.hashes[at] in self.stored[OWNERS[tenant]]
            assert bytes(out) == bytes_of(OWNERS[tenant], self.spec, chain.hashes[at])
        else:
            assert self.visible(tenant, chain) < len(chain)

    def pin(self, tenant: str, chain: Chain) -> None:
        blocks = self.visible(tenant, chain)
        pinned = self.clients[tenant].pin(chain, 60.0)
        assert (pinned.blocks, pinned.nbytes) == (blocks, blocks * self.spec.layout().nbytes)
        for name, client in self.clients.items():
            if name != tenant:
                assert client.unpin(chain) == 0
        assert self.clients[tenant].unpin(chain) == blocks

    def prefetch(self, tenant: str, chain: Chain) -> None:
        ticket = self.clients[tenant].prefetch(chain)
        assert ticket.wait(20.0).state == "done"
        for name, client in self.clients.items():
            if name != tenant:
                with pytest.raises(NotFound):
                    type(ticket).progress(_as_seen_by(client, ticket, self.chains[0]))

    def delete(self, tenant: str, chain: Chain) -> None:
        known = self.stored[OWNERS[tenant]].pop(chain.hashes[-1], None)
        assert self.clients[tenant].delete(chain) == (known is not None)

    def clear(self, tenant: str, chain: Chain) -> None:
        stored = self.stored[OWNERS[tenant]]
        own = [chain_hash for chain_hash, storer in stored.items() if storer == tenant]
        assert self.clients[tenant].clear(self.spec.namespace) == len(own)
        for chain_hash in own:
            del stored[chain_hash]

    def end_session(self, tenant: str, chain: Chain) -> None:
        retired = self.clients[tenant].end_session(self.spec.namespace, "chat")
        assert retired == 0 or tenant in self.talked
        self.talked.discard(tenant)

    def check(self) -> None:
        for tenant, client in self.clients.items():
            for chain in self.chains:
                assert client.lookup(chain).blocks == self.visible(tenant, chain), tenant


def _as_seen_by(client: Cache, ticket: Any, chain: Chain) -> Any:
    """The same ticket in another tenant's hand."""
    own: Any = client.prefetch(head(chain, 0))
    own.id = ticket.id
    return own


ACTIONS = ("store", "store", "store", "acquire", "read_into", "pin", "prefetch", "delete", "clear", "end_session")
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from(sorted(OWNERS)), st.integers(0, 2), st.integers(1, 4)),
    min_size=1,
    max_size=25,
)


@pytest.fixture(scope="module")
def clients(deployment: Deployment) -> dict[str, Cache]:
    return {name: deployment.connect(name) for name in OWNERS}


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_nobody_meets_the_blocks_of_a_stranger(
    clients: dict[str, Cache], steps: list[tuple[str, str, int, int]]
) -> None:
    house = House(clients)
    for action, tenant, chain, blocks in steps:
        getattr(house, action)(tenant, head(house.chains[chain], blocks))
        house.check()


def test_leases_are_no_use_to_a_stranger(clients: dict[str, Cache]) -> None:
    house = House(clients)
    chain = house.chains[0]
    for tenant in ("alice", "carol"):
        house.store(tenant, chain)
    for holder, other in (("alice", "bob"), ("carol", "dave")):
        with clients[holder].acquire(chain) as mine, clients[other].acquire(chain, compute_s=1.0) as theirs:
            theirs.id = mine.id
            with pytest.raises(LeaseLost):
                theirs.renew(1.0)
        with clients[holder].acquire(chain) as mine:
            assert len([bytes(mine.view(ref.index)) for ref in mine.blocks]) == 4


def test_a_stranger_prefetches_nothing(clients: dict[str, Cache]) -> None:
    spec = make_spec()
    for client in clients.values():
        client.register(spec)
    carol, chain = clients["carol"], make_chain(spec, 4)
    store(carol, spec, chain)
    for seed in range(1, 9):
        store(carol, spec, make_chain(spec, 256, seed))  # the size of the memory in all
    carol.flush()
    assert set(carol.lookup(chain).tiers) == {"cold"}
    for name in ("alice", "erin"):
        assert clients[name].prefetch(chain).progress().blocks_total == 0
    assert set(carol.lookup(chain).tiers) == {"cold"}
    ticket = clients["dave"].prefetch(chain)
    assert ticket.wait(20.0).blocks_total == 4
    assert set(carol.lookup(chain).tiers) == {"warm"}
    carol.clear(spec.namespace)


def used(cache: Cache, tenant: str, tier: str = "warm") -> int:
    nbytes: int = cache.stats()["tenants"][tenant]["used_bytes"].get(tier, 0)
    return nbytes


def test_a_quota_of_memory_is_never_exceeded(deployment: Deployment, spec: KVSpec) -> None:
    small = deployment.connect("small")
    chains = [make_chain(spec, 32, seed) for seed in range(10)]  # two and a half quotas
    for chain in chains:
        assert store(small, spec, chain) == 32
        assert used(small, "small") <= QUOTA
    assert used(small, "small") == QUOTA
    assert [small.lookup(chain).blocks for chain in chains] == [32] * 10
    with small.acquire(chains[0], wait_s=20.0) as read:
        assert read.hit_blocks == 32
        assert used(small, "small") <= QUOTA
    small.clear(spec.namespace)


def test_a_quota_of_the_disk_holds_after_a_flush(deployment: Deployment, spec: KVSpec) -> None:
    poor = deployment.connect("poor")
    chains = [make_chain(spec, 32, seed) for seed in range(10)]
    for chain in chains:
        store(poor, spec, chain)
        poor.flush()
        assert used(poor, "poor", "cold") <= QUOTA
    assert used(poor, "poor", "cold") > QUOTA // 2
    assert poor.lookup(chains[-1]).blocks == 32
    poor.clear(spec.namespace)
    assert used(poor, "poor", "cold") == 0


def test_a_quota_of_device_memory_is_never_exceeded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    tiers = {"hot": {"capacity": "2MiB", "device": "cpu"}, "warm": {"capacity": "8MiB", "directory": str(tmp_path)}}
    with tierkv.open({**tiers, "tenants": {"default": {"hot": QUOTA}}}) as cache:
        spec = make_spec()
        cache.register(spec)
        for seed in range(6):
            assert store(cache, spec, make_chain(spec, 64, seed)) == 64
            assert used(cache, "default", "hot") <= QUOTA
        assert used(cache, "default", "hot") > 0


LIMITS = {"warm": {"capacity": "1MiB"}, "limits": {"tenants": 2, "namespaces": 2}}


def fill_up(connect: Callable[[str], Cache]) -> KVSpec:
    """Meet one tenant and one namespace more than is allowed."""
    specs = [make_spec() for _ in range(3)]
    one, two = connect("one"), connect("two")
    one.register(specs[0])
    two.register(specs[1])
    two.register(specs[0])
    with pytest.raises(LimitExceeded, match="namespaces"):
        two.register(specs[2])
    for client in (one, two):
        assert client.lookup(make_chain(specs[0], 2)).blocks == 0
    with pytest.raises(LimitExceeded, match="tenants"):
        connect("three").lookup(make_chain(specs[0], 2))
    assert one.lookup(make_chain(specs[1], 2)).blocks == 0
    return specs[0]


def test_tenants_and_namespaces_are_limited(tmp_path: Path) -> None:
    with tierkv.open({**LIMITS, "warm": {"capacity": "1MiB", "directory": str(tmp_path)}}, tenant="one") as cache:
        assert isinstance(cache, EmbeddedCache)
        fill_up(cache.for_tenant)


def test_over_the_wire_a_limit_is_429() -> None:
    with running(LIMITS) as daemon:
        spec = fill_up(lambda tenant: tierkv.connect(daemon.url, tenant=tenant))
        raw = Raw(daemon.tcp_port)
        body = b'{"tokens": [1, 2, 3]}'
        headers = {"Content-Type": "application/json", "Tierkv-Tenant": "four"}
        status, problem, _ = raw.request("POST", f"/v1/{spec.namespace}/lookup", body, headers)
        assert (status, problem["type"]) == (429, "urn:tierkv:problem:limit-exceeded")


BLOCKS = 128  # of the memory below


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedCache]:
    granted = {"light": {"weight": 1}, "heavy": {"weight": 3}}
    warm = {"capacity": "1MiB", "directory": str(tmp_path)}
    with tierkv.open({"warm": warm, "tenants": granted}, tenant="light") as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


def blocks(cache: EmbeddedCache, tenant: str) -> int:
    return used(cache, tenant) // BLOCK_BYTES


_prompts = itertools.count()


def scan(cache: Cache, spec: KVSpec, count: int) -> None:
    """Store `count` blocks of prompts nobody has asked for before."""
    for number in itertools.islice(_prompts, count):
        prompt = Chain.of(spec, np.arange(BLOCK_TOKENS) + BLOCK_TOKENS * (number + 100_000))
        assert store(cache, spec, prompt, wait_s=0.0) == 1


def test_who_is_alone_uses_everything(engine: EmbeddedCache) -> None:
    spec = make_spec()
    light, heavy = engine, engine.for_tenant("heavy")
    light.register(spec)
    scan(light, spec, 2 * BLOCKS)
    assert blocks(engine, "light") == BLOCKS
    light.clear(spec.namespace)
    scan(heavy, spec, 2 * BLOCKS)
    assert (blocks(engine, "light"), blocks(engine, "heavy")) == (0, BLOCKS)


def test_who_is_within_its_share_loses_nothing(engine: EmbeddedCache) -> None:
    spec = make_spec()
    light, heavy = engine, engine.for_tenant("heavy")
    light.register(spec)
    chain = make_chain(spec, BLOCKS // 4 - 2)
    store(light, spec, chain)
    scan(heavy, spec, 4 * BLOCKS)
    assert light.lookup(chain).blocks == len(chain)
    assert blocks(engine, "heavy") == BLOCKS - len(chain)
    assert not engine.stats()["tenants"]["light"]["evicted_blocks"]


def test_who_is_over_its_share_loses_first(engine: EmbeddedCache) -> None:
    spec = make_spec()
    light, heavy = engine, engine.for_tenant("heavy")
    light.register(spec)
    scan(light, spec, BLOCKS)
    chain = make_chain(spec, BLOCKS * 3 // 4)
    for start in range(len(chain)):
        store(heavy, spec, head(chain, start + 1), start, wait_s=0.0)
        assert blocks(engine, "light") == BLOCKS - start - 1
    assert heavy.lookup(chain).blocks == len(chain)
    # Now everybody has what it can count on, and pays for more itself.
    scan(light, spec, 10)
    assert heavy.lookup(chain).blocks == len(chain)


def test_who_has_exactly_its_share_loses_nothing(engine: EmbeddedCache) -> None:
    spec = make_spec()
    light, heavy = engine, engine.for_tenant("heavy")
    light.register(spec)
    for client, count in ((light, BLOCKS // 4 - 1), (heavy, 1), (light, 1), (heavy, BLOCKS)):
        scan(client, spec, count)
    assert blocks(engine, "light") == BLOCKS // 4
    assert not engine.stats()["tenants"]["light"]["evicted_blocks"]


def test_shares_go_by_weight(engine: EmbeddedCache) -> None:
    spec = make_spec()
    tenants = [(engine, "light"), (engine.for_tenant("heavy"), "heavy")]
    engine.register(spec)
    for client, _ in itertools.islice(itertools.cycle(tenants), 2 * BLOCKS):
        scan(client, spec, 2)
    assert abs(blocks(engine, "light") - BLOCKS // 4) <= 1
    assert abs(blocks(engine, "heavy") - BLOCKS * 3 // 4) <= 1


def test_who_is_idle_has_no_share(engine: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    light, heavy = engine, engine.for_tenant("heavy")
    light.register(spec)
    clock = Clock(monkeypatch, engine)
    chain = make_chain(spec, 20)
    store(light, spec, chain)
    scan(heavy, spec, 2 * BLOCKS)
    clock.advance(fairness.IDLE_S / 2)
    scan(heavy, spec, 1)
    light.acquire(chain, ttl_s=1.0).release()  # heard of again
    clock.advance(fairness.IDLE_S * 3 / 4)
    scan(heavy, spec, BLOCKS)
    assert light.lookup(chain).blocks == 20
    clock.advance(fairness.IDLE_S / 2)
    assert light.lookup(chain).blocks == 20  # nobody needed the room, and looking does not count
    scan(heavy, spec, BLOCKS)
    assert light.lookup(chain).blocks == 0
    assert (blocks(engine, "light"), blocks(engine, "heavy")) == (0, BLOCKS)
    store(light, spec, chain)
    scan(heavy, spec, BLOCKS)
    assert light.lookup(chain).blocks == 20


@settings(max_examples=25)
@given(
    weights=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=2, max_size=4),
    stores=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=12),
)
def test_nobody_within_its_share_pays_for_another(weights: list[int], stores: list[tuple[int, int]]) -> None:
    names = [f"tenant-{n}" for n in range(len(weights))]
    granted = {name: {"weight": weight} for name, weight in zip(names, weights, strict=True)}
    with tierkv.open({"warm": {"capacity": "1MiB"}, "tenants": granted}, tenant=names[0]) as cache:
        assert isinstance(cache, EmbeddedCache)
        spec = make_spec()
        cache.register(spec)
        views = [cache.for_tenant(name) for name in names]
        for n, count in stores:
            storing = n % len(names)
            before = [blocks(cache, name) for name in names]
            scan(views[storing], spec, count)
            after = [blocks(cache, name) for name in names]
            active = sum(w for n, w in enumerate(weights) if before[n] or n == storing)
            for other, weight in enumerate(weights):
                if other != storing and before[other] < BLOCKS * weight / active:
                    assert after[other] == before[other]
            assert sum(after) <= BLOCKS
            # A newcomer gets its share, whoever has the memory.
            assert after[storing] >= min(before[storing] + count, int(BLOCKS * weights[storing] / active))


SAMPLES = 1500
_now = time.perf_counter_ns


def nanoseconds(look: Callable[[Chain], object], chains: list[tuple[Chain, Chain]]) -> NDArray[np.int64]:
    """Time a look at each chain, those of a pair in turn; two columns."""
    times = np.empty((len(chains), 2), np.int64)
    gc.disable()
    try:
        for row, pair in enumerate(chains):
            for column in ((0, 1), (1, 0))[row % 2]:
                began = _now()
                look(pair[column])
                times[row, column] = _now() - began
    finally:
        gc.enable()
    return times


def compared(times: NDArray[np.int64]) -> tuple[float, float]:
    """Compare two columns: the ratio of their medians, and how often one of the first is beaten by one of the second
    (Mann-Whitney's U as a share; 0.5 for equals, with a deviation of 0.01 here)."""
    medians = np.median(times, axis=0)
    second = np.sort(times[:, 1])
    beaten = np.searchsorted(second, times[:, 0], "left") + np.searchsorted(second, times[:, 0], "right")
    return float(medians[0] / medians[1]), float(beaten.mean()) / (2 * len(second))


@pytest.mark.parametrize("leak", [False, True])
def test_the_time_of_a_lookup_tells_nothing_of_others(tmp_path: Path, leak: bool) -> None:
    """`leak`: a cache that takes a fifth longer for what others have would be found out."""
    tiers = {"warm": {"capacity": "4MiB", "directory": str(tmp_path)}, "cold": {"capacity": "64MiB", "codec": "raw"}}
    with tierkv.open({"state_dir": str(tmp_path / "state"), **tiers}, tenant="alice") as alice:
        assert isinstance(alice, EmbeddedCache)
        spec = small_spec()
        alice.register(spec)
        bob = alice.for_tenant("bob")
        store(bob, spec, make_chain(spec, 4, seed=4095))
        pairs = [(make_chain(spec, 4, seed), make_chain(spec, 4, SAMPLES + seed)) for seed in range(SAMPLES)]
        # Where the chains lie in this process's memory shows in the times, too: the same ones before and after.
        nanoseconds(bob.lookup, pairs)
        before = nanoseconds(bob.lookup, pairs)
        for seed in range(SAMPLES):  # 6 MB: some in memory, some on disk only
            store(alice, spec, make_chain(spec, 4, seed))
        tiers_used = {tier for seed in range(SAMPLES) for tier in alice.lookup(make_chain(spec, 4, seed)).tiers}
        assert tiers_used == {"warm", "cold"}
        slower = {chain.hashes for chain, _ in pairs if leak}
        late = 0.2 * float(np.median(before))

        def look(chain: Chain) -> None:
            bob.lookup(chain)
            if leak and chain.hashes in slower:
                until = _now() + late
                while _now() < until:
                    pass

        after = nanoseconds(look, pairs)
        (ratio, share), (ratio_then, share_then) = compared(after), compared(before)
        assert (abs(ratio / ratio_then - 1.0) > 0.1 or abs(share - share_then) > 0.15) == leak
