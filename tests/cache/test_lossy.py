"""Namespaces stored lossily: exact while in memory, close and always the same from the disk, verified throughout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tierkv
from tierkv.cache import Cache, Chain
from tierkv.embedded import EmbeddedCache
from tierkv.errors import CorruptBlock, StorageError
from tierkv.spec import LOSSY_CODECS, KVGroup, KVSpec
from tierkv.storage.tier import Tier

from .support import make_chain, make_spec, store_far, wait_until
from .test_races import Gate

SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB"}}
GROUP = KVGroup((0, 1, 2, 3), "full", 2, 64)
BLOCK = 32 << 10
WHOLE = 32  # blocks that fill the warm tier
FINENESS = {"int8": (0, 0), "eq2": (1 / 16, 1 / 16), "eq3": (1 / 8, 1 / 4), "eq4": (1 / 4, 1 / 2), "eq5": (1 / 2, 1)}

Singles = NDArray[np.float32]


def kv_spec(**fields: Any) -> KVSpec:
    spec = make_spec(GROUP, dtype="bfloat16", **fields)
    assert spec.layout().nbytes == BLOCK
    return spec


def kv(chain: Chain, index: int, version: int = 0) -> bytes:
    """A block like real ones: channels of K differ in scale and offset, tokens of V in scale."""
    rng = np.random.default_rng([int.from_bytes(chain.hashes[index][:8], "little"), version])
    values = rng.standard_normal((4, 2, 16, 2, 64), np.float32)
    values[:, 0] *= np.exp2(rng.integers(-3, 4, (4, 1, 2, 64))).astype(np.float32)
    values[:, 0] += rng.standard_normal((4, 1, 2, 64), np.float32)
    values[:, 1] *= np.exp2(rng.integers(-3, 4, (4, 16, 2, 1))).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def numbers(payload: bytes) -> Singles:
    return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(4, 2, 16, 2, 64)


def off_by(exact: bytes, found: bytes, codec: str) -> float:
    """The largest error, in units of what one coding may cost: half a step, and rounding to bfloat16.

    Steps are rounded to four bits, the smallest that do not clip upwards.
    """
    values = numbers(exact)
    keys, rows = values[:, 0], values[:, 1]
    centered = keys - keys.mean(axis=1, keepdims=True)
    k, v = FINENESS[codec]
    k_least, v_least = np.abs(centered).max(axis=1, keepdims=True) / 126, np.abs(rows).max(axis=-1, keepdims=True) / 127
    v_rms = np.sqrt(np.square(rows).mean(axis=-1, keepdims=True))
    k_step = np.maximum(k * keys.std(axis=1, keepdims=True) * 17 / 16, k_least * 9 / 8)
    v_step = np.maximum(v * v_rms * 17 / 16, v_least * 9 / 8)
    steps = np.stack(np.broadcast_arrays(k_step, v_step, keys)[:2], axis=1)
    allowed = steps / 2 + np.abs(values) / 128
    return float((np.abs(numbers(found) - values) / allowed).max())


def store(cache: Cache, chain: Chain, version: int = 0) -> int:
    with cache.reserve(chain, wait_s=60.0) as lease:
        for grant in lease.granted:
            lease.buffer(grant.index)[:] = kv(chain, grant.index, version)
        return lease.commit()


def read(cache: Cache, chain: Chain) -> list[bytes]:
    with cache.acquire(chain, wait_s=20.0) as lease:
        assert lease.hit_blocks == len(chain)
        return [bytes(lease.view(index)) for index in range(len(chain))]


def exact(chain: Chain, version: int = 0) -> list[bytes]:
    return [kv(chain, index, version) for index in range(len(chain))]


def push_out(cache: Cache, seed: int = 0) -> None:
    """Fill memory with something else."""
    filler = make_spec(GROUP, dtype="bfloat16")
    cache.register(filler)
    cache.flush()
    store_far(cache, filler, make_chain(filler, 2 * WHOLE, seed))
    cache.flush()


def read_cold(cache: Cache, chain: Chain) -> list[bytes]:
    push_out(cache)
    assert set(cache.lookup(chain).tiers) == {"cold"}
    return read(cache, chain)


def corruption(cache: Cache) -> dict[str, int]:
    return dict(cache.stats()["counters"]["corrupt_blocks"])


def assert_close(chain: Chain, found: list[bytes], codec: str, *, times: float = 1.0, version: int = 0) -> None:
    for index, payload in enumerate(found):
        assert payload != kv(chain, index, version)
        assert off_by(kv(chain, index, version), payload, codec) <= times


@pytest.mark.parametrize("exact_first", [False, True])
def test_memory_is_exact_and_the_disk_is_close(cache: Cache, peer: Cache, exact_first: bool) -> None:
    spec = kv_spec(lossy="eq3", exact_first_block=exact_first)
    for client in (cache, peer):
        client.register(spec)
    before = corruption(cache)
    chain = make_chain(spec, 8)
    assert store(cache, chain) == 8
    assert read(peer, chain) == exact(chain)
    cache.flush()
    assert read(peer, chain) == exact(chain)
    found = read_cold(peer, chain)
    if exact_first:
        assert found[0] == kv(chain, 0)
        assert_close(Chain(chain.namespace, chain.hashes[1:]), found[1:], "eq3")
    else:
        assert_close(chain, found, "eq3")
    assert read(cache, chain) == found
    assert read_cold(cache, chain) == found
    assert store(cache, chain) == 0
    assert corruption(cache) == before


def test_a_lossy_and_a_lossless_namespace_share_nothing(cache: Cache) -> None:
    spec = kv_spec()
    specs = [spec, replace(spec, lossy="eq2"), replace(spec, lossy="eq5"), replace(spec, lossy="eq5", adapter="a")]
    chains = [make_chain(spec, 3) for spec in specs]
    for number, spec in enumerate(specs):
        cache.register(spec)
        assert cache.lookup(chains[number]).blocks == 0
        assert store(cache, chains[number], number) == 3
    push_out(cache)
    assert read(cache, chains[0]) == exact(chains[0])
    assert_close(chains[1], read(cache, chains[1]), "eq2", version=1)
    assert_close(chains[2], read(cache, chains[2]), "eq5", version=2)
    assert cache.clear(specs[2].namespace) == 3
    assert [cache.lookup(chain).blocks for chain in chains] == [3, 3, 0, 3]


def opened(home: Path, **changes: Any) -> EmbeddedCache:
    warm = {"capacity": "1MiB", "directory": str(home), "policy": "lru"}
    cache = tierkv.open({"state_dir": str(home / "state"), "warm": warm, "cold": {"capacity": "32MiB"}, **changes})
    assert isinstance(cache, EmbeddedCache)
    return cache


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedCache]:
    with opened(tmp_path) as cache:
        yield cache


def cold_of(cache: EmbeddedCache) -> Tier:
    cold = cache.engine.placement.cold
    assert cold is not None
    return cold


def drop_from_disk(cache: EmbeddedCache) -> None:
    """Let the cold tier forget everything, as it does with the oldest when it needs room."""
    keys = [key for key, _ in cold_of(cache).records()]
    for key in keys:
        cold_of(cache).delete(key)
    cache.engine.on_cold_evicted(keys)


def stored_bytes(cache: Cache) -> int:
    return int(cache.stats()["tiers"]["cold"]["stored_bytes"])


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_every_level_is_the_same_after_restarts(tmp_path: Path, codec: str) -> None:
    spec = kv_spec(lossy=codec)
    chain = make_chain(spec, 6)
    with opened(tmp_path) as cache:
        cache.register(spec)
        store(cache, chain)
        assert read(cache, chain) == exact(chain)
    seen = []
    for _ in range(2):
        with opened(tmp_path) as cache:
            cache.register(spec)
            seen += [read(cache, chain), read(cache, chain)]
            assert corruption(cache) == {}
    assert_close(chain, seen[0], codec)
    assert seen == [seen[0]] * 4


def test_lossy_blocks_take_less_of_the_disk(embedded: EmbeddedCache) -> None:
    sizes = []
    for lossy in ("", "int8", "eq3", "eq5"):
        spec = kv_spec(lossy=lossy)
        embedded.register(spec)
        before = stored_bytes(embedded)
        store(embedded, make_chain(spec, 16))
        embedded.flush()
        sizes.append(stored_bytes(embedded) - before)
    assert sizes == sorted(sizes, reverse=True)
    lossless, int8, eq3, _ = sizes
    assert lossless < 16 * BLOCK
    assert int8 < 0.85 * lossless
    assert eq3 < 0.6 * lossless


def test_the_servers_codec_may_change_between_restarts(tmp_path: Path) -> None:
    plain, lossy = kv_spec(), kv_spec(lossy="eq3")
    close = make_chain(lossy, 3)
    kept: list[list[bytes]] = []
    for number, codec in enumerate(("raw", "bx1", "raw")):
        with opened(tmp_path, cold={"capacity": "32MiB", "codec": codec}) as cache:
            cache.register(plain)
            cache.register(lossy)
            for seed in range(number):
                assert read(cache, make_chain(plain, 3, seed)) == exact(make_chain(plain, 3, seed))
            before = stored_bytes(cache)
            store(cache, make_chain(plain, 3, number))
            cache.flush()
            assert (stored_bytes(cache) - before < 3 * BLOCK) == (codec == "bx1")
            store(cache, close)
            kept.append(read_cold(cache, close))
            assert corruption(cache) == {}
    assert kept == [kept[0]] * 3
    assert_close(close, kept[0], "eq3")


def test_what_is_not_a_number_is_stored_exactly(embedded: EmbeddedCache) -> None:
    spec = kv_spec(lossy="eq5")
    embedded.register(spec)
    chain = make_chain(spec, 1)
    payload = bytearray(kv(chain, 0))
    payload[100:102] = b"\xff\x7f"
    with embedded.reserve(chain) as lease:
        lease.buffer(0)[:] = payload
        lease.commit()
    assert read_cold(embedded, chain) == [payload]


@pytest.mark.parametrize("lossy", ["", "eq3"])
def test_a_block_found_at_start_is_coded_again_like_a_new_one(tmp_path: Path, lossy: str) -> None:
    spec = kv_spec(lossy=lossy)
    chain = make_chain(spec, 16)
    with opened(tmp_path) as cache:
        cache.register(spec)
        store(cache, chain)
        cache.flush()
        first = stored_bytes(cache)
    with opened(tmp_path) as cache:
        cache.register(spec)
        found = read(cache, chain)
        drop_from_disk(cache)
        assert set(cache.lookup(chain).tiers) == {"warm"}
        before = stored_bytes(cache)
        cache.flush()
        assert stored_bytes(cache) - before <= first
        assert read(cache, chain) == found
        again = read_cold(cache, chain)
        assert read_cold(cache, chain) == again
        assert corruption(cache) == {}
    if lossy:
        assert_close(chain, again, lossy, times=2.0)
    else:
        assert again == found == exact(chain)


def test_a_damaged_exact_copy_gives_way_to_the_stored_one(embedded: EmbeddedCache) -> None:
    spec = kv_spec(lossy="eq3")
    embedded.register(spec)
    chain = make_chain(spec, 3)
    store(embedded, chain)
    embedded.flush()
    with embedded.acquire(chain) as lease:
        damage(lease, 1)
        with pytest.raises(CorruptBlock):
            lease.view(1)
    assert corruption(embedded) == {"warm/checksum": 1}
    mixed = read(embedded, chain)
    assert [mixed[0], mixed[2]] == [kv(chain, 0), kv(chain, 2)]
    assert 0 < off_by(kv(chain, 1), mixed[1], "eq3") <= 1
    found = read_cold(embedded, chain)
    assert_close(chain, found, "eq3")
    assert found[1] == mixed[1]
    assert corruption(embedded) == {"warm/checksum": 1}


def damage(lease: Any, index: int) -> None:
    lease._plane.view(lease.blocks[index])[100] ^= 1


def test_bytes_of_an_older_version_left_on_the_disk_are_replaced(
    embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kv_spec(lossy="eq3")
    embedded.register(spec)
    chain = make_chain(spec, 1)
    store(embedded, chain)
    embedded.flush()

    def refuse(key: bytes) -> bool:
        raise StorageError("the disk refuses")

    with monkeypatch.context() as patched:
        patched.setattr(cold_of(embedded), "delete", refuse)
        with pytest.raises(StorageError):
            embedded.delete(chain)
    store(embedded, chain, version=1)
    assert_close(chain, read_cold(embedded, chain), "eq3", version=1)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EmbeddedCache]:
    pytest.importorskip("torch")
    with opened(tmp_path, hot={"capacity": "512KiB", "device": "cpu", "policy": "lru"}) as cache:
        yield cache


def everywhere(cache: Cache, chain: Chain, tier: str) -> bool:
    return set(cache.lookup(chain).tiers) == {tier}


def test_copies_in_all_tiers_agree(three: EmbeddedCache) -> None:
    spec = kv_spec(lossy="eq3")
    three.register(spec)
    chain = make_chain(spec, 4)
    store(three, chain)
    assert everywhere(three, chain, "hot")
    three.flush()
    assert read(three, chain) == exact(chain)
    found = read_cold(three, chain)
    assert_close(chain, found, "eq3")
    assert everywhere(three, chain, "warm")
    three.prefetch(chain)
    wait_until(lambda: everywhere(three, chain, "hot"))
    assert read(three, chain) == found
    assert read_cold(three, chain) == found
    assert corruption(three) == {}


def test_an_exact_copy_that_goes_during_its_promotion_is_not_promoted(
    three: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kv_spec(lossy="eq3")
    three.register(spec)
    chain = make_chain(spec, 1)
    store(three, chain)
    three.flush()
    filler = make_spec(GROUP, dtype="bfloat16")
    three.register(filler)
    store_far(three, filler, make_chain(filler, WHOLE // 2))
    assert everywhere(three, chain, "warm")
    with monkeypatch.context() as patched:
        gate = Gate(patched, three.engine.placement.memory[0].tier, "write")
        ticket = three.prefetch(chain)
        assert gate.reached.wait(30.0)
        with three.acquire(chain, wait_s=0.0) as lease:
            assert bytes(lease.view(0)) == kv(chain, 0)
            damage(lease, 0)
            with pytest.raises(CorruptBlock):
                lease.view(0)
        gate.open()
        wait_until(lambda: ticket.progress().state == "done")
    assert everywhere(three, chain, "cold")
    assert_close(chain, read(three, chain), "eq3")
    assert corruption(three) == {"warm/checksum": 1}
