"""The backend alone: whose pages it finds, what it refuses, and what becomes of errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.cli import command
from tests.sglang.released import (
    LAYERS,
    PAGE,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolName,
    fill,
    key,
    layer_rows,
    mha_pool,
    mla_pool,
    page_hashes,
    storage_config,
)
from tests.test_checkpoint import LLAMA
from tests.test_checkpoint import write as write_checkpoint
from tierkv.engines.sglang import Options, TierKVHiCache, hicache
from tierkv.errors import ConfigError, SpecMismatch, TierKVError

Make = Callable[..., TierKVHiCache]
HASHES = page_hashes(key(range(8 * PAGE)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes backends over embedded caches; each has its own."""
    with ExitStack() as stack:

        def backend(pool: Any = None, extra: Mapping[str, Any] | None = None, **config: Any) -> TierKVHiCache:
            settings = {"warm": {"capacity": "1MiB", "directory": str(tmp_path)}}
            made = TierKVHiCache(storage_config({"config": settings, "weights": "1", **(extra or {})}, **config), {})
            stack.callback(made.close)
            made.register_mem_pool_host(mha_pool() if pool is None else pool)
            return made

        yield backend


def at(pages: int) -> torch.Tensor:
    return torch.arange(pages * PAGE)


def after(*hashes: str) -> Any:
    return HiCacheStorageExtraInfo(prefix_keys=list(hashes))


def test_each_page_is_answered_for(make: Make) -> None:
    backend = make()
    assert backend.batch_exists(HASHES) == 0
    assert backend.batch_get_v1(HASHES[:3], at(3)) == [False] * 3
    assert backend.batch_set_v1(HASHES[:3], at(3), after()) == [True] * 3
    assert backend.batch_set_v1(HASHES[:3], at(3), after()) == [True] * 3
    assert backend.batch_exists(HASHES) == 3
    assert backend.batch_get_v1(HASHES[:5], at(5)) == [True, True, True, False, False]
    assert (backend.exists(HASHES[2]), backend.exists(HASHES[3])) == (True, False)
    assert backend.batch_get_v1([], at(0)) == backend.batch_set_v1([], at(0)) == []
    assert backend.batch_exists([]) == 0
    assert not backend.errors


def test_flat_pages_are_copied_and_returned(make: Make) -> None:
    backend = make()
    pool = backend.mem_pool_host
    fill(pool, 1)
    wanted = [pool.get_data_page(index).clone() for index in (0, PAGE)]
    assert backend.set(HASHES[0], wanted[0])
    assert backend.batch_set(HASHES[:2], wanted)
    first = pool.get_dummy_flat_data_page()
    assert backend.get(HASHES[0], first) is first
    found = backend.batch_get(HASHES[:3])
    assert [page is not None for page in found] == [True, True, False]
    for want, have in zip(wanted, [first, found[1]], strict=True):
        assert torch.equal(want.view(torch.int16), have.view(torch.int16))
    assert backend.get(HASHES[4], first) is None


def test_pages_continue_the_chain_of_their_prefix(make: Make) -> None:
    backend = make()
    backend.batch_set_v1(HASHES[:3], at(3), after())
    backend.batch_set_v1(HASHES[3:5], at(2), after(*HASHES[:3]))
    trunks = backend._cache.engine.trunks(9)  # type: ignore[attr-defined]
    assert [(trunk.depth, trunk.blocks) for trunk in trunks] == [(0, 5)]


def test_pages_whose_prefix_is_not_stored_are_found_all_the_same(make: Make) -> None:
    backend = make()
    assert backend.batch_set_v1(HASHES[3:5], at(2), after(*HASHES[:3])) == [True, True]
    assert backend.batch_exists(HASHES[3:], after(*HASHES[:3])) == 2


def test_clear_forgets_these_pages(make: Make) -> None:
    backend = make()
    backend.batch_set_v1(HASHES[:3], at(3))
    backend.clear()
    assert backend.batch_exists(HASHES) == 0


CHANGES: list[tuple[str, Callable[[], Any], dict[str, Any], dict[str, Any]]] = [
    ("weights", mha_pool, {"weights": "2"}, {}),
    ("model", mha_pool, {}, {"model_name": "other"}),
    ("dtype", lambda: mha_pool(dtype=torch.float16), {}, {}),
    ("page size", lambda: mha_pool(page=8), {}, {}),
    ("head size", lambda: mha_pool(dim=4), {}, {}),
    ("latents", mla_pool, {}, {"is_mla_model": True}),
    ("tensor-parallel rank", mha_pool, {}, {"tp_rank": 1, "tp_size": 2}),
    ("tensor-parallel size", mha_pool, {}, {"tp_size": 2}),
    ("pipeline rank", mha_pool, {}, {"pp_rank": 1, "pp_size": 2}),
    ("context-parallel rank", mha_pool, {}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
]


@pytest.mark.parametrize(("pool", "extra", "config"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_changes_the_kv_changes_the_namespace(
    pool: Callable[[], Any], extra: dict[str, Any], config: dict[str, Any], make: Make
) -> None:
    assert make(pool(), extra, **config).spec.namespace != make().spec.namespace


@pytest.mark.parametrize("config", [{"dp_rank": 1}, {"is_page_first_layout": False}, {"enable_storage_metrics": True}])
def test_what_does_not_change_the_kv_does_not_change_the_namespace(config: dict[str, Any], make: Make) -> None:
    assert make(mha_pool("layer_first"), **config).spec.namespace == make().spec.namespace


def test_latents_are_shared_by_the_ranks_that_all_have_them(make: Make) -> None:
    ranks = [make(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert ranks[0].spec.namespace == ranks[1].spec.namespace
    group = ranks[0].spec.groups[0]
    assert (group.kind, group.kv_heads, group.head_dim, group.layers) == ("mla", 1, 16, tuple(range(LAYERS)))


def test_two_fp8_formats_never_share(make: Make) -> None:
    formats = ["float8_e4m3", "float8_e5m2"]
    specs = [make(mha_pool(dtype=torch.uint8), {"kv_dtype": name}).spec for name in formats]
    assert [spec.dtype for spec in specs] == formats
    with pytest.raises(ConfigError, match="kv_dtype"):
        make(mha_pool(dtype=torch.uint8))
    with pytest.raises(ConfigError, match="bfloat16"):
        make(mha_pool(), {"kv_dtype": "float8_e4m3"})


@pytest.mark.parametrize("named", ["checkpoint", "model_name"])
def test_the_weights_are_those_of_the_checkpoint(named: str, tmp_path: Path, make: Make) -> None:
    directory = write_checkpoint(tmp_path / "model", LLAMA, 10_000)

    def namespace() -> str:
        given = {"weights": ""} | ({"checkpoint": str(directory)} if named == "checkpoint" else {})
        config = {"model_name": str(directory)} if named == "model_name" else {}
        return make(extra=given, **config).spec.namespace

    before = namespace()
    assert namespace() == before
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert namespace() != before


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"weights": ""}, {}, "checkpoint"),
    ({}, {"model_name": None}, "no name"),
    ({"url": "unix:///run/s"}, {}, "one cache"),
    ({"config": ""}, {}, "one cache"),
    ({"wieghts": "1"}, {}, "did you mean 'weights'"),
    ({"wait_s": "soon"}, {}, "wait_s"),
    ({"wait_s": -1}, {}, "wait_s"),
    ({"tenant": 3}, {}, "tenant"),
    ({}, {"dcp_size": 2, "is_mla_model": True, "tp_size": 2, "logical_page_size": 8}, "context parallelism"),
]


@pytest.mark.parametrize(("extra", "config", "said"), REFUSED)
def test_a_wrong_configuration_is_refused_before_anything_is_served(
    extra: dict[str, Any], config: dict[str, Any], said: str, make: Make
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(extra=extra, **config)


def test_what_engine_args_prints_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with command(capfd) as tierkv:
        _, printed, _ = tierkv("engine-args", "sglang", "--url", "unix:///run/s")
    assert Options.read(json.loads(shlex.split(printed)[-1])).url == "unix:///run/s"


def test_pools_that_are_not_plain_kv_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="AsymmetricMHA"):
        make(mha_pool(v_dim=4))
    with pytest.raises(ConfigError, match="page_unified"):
        make(mha_pool("page_unified"))
    copying = mha_pool()
    show = copying.get_data_page
    copying.get_data_page = lambda index, flat: show(index, flat).clone()
    with pytest.raises(ConfigError, match="MHATokenToKVPoolHost"):
        make(copying)
    backend = make()
    backend.register_mem_host_pool_v2(mha_pool(), PoolName.KV)
    for name in (PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT):
        with pytest.raises(ConfigError, match=name.value):
            backend.register_mem_host_pool_v2(mha_pool(), name)


def test_pages_that_no_tier_can_hold_are_refused(make: Make) -> None:
    with pytest.raises(SpecMismatch):
        make(mha_pool(dim=1 << 15, tokens=8))


def test_a_damaged_page_is_a_miss_and_what_precedes_it_is_not(make: Make) -> None:
    backend = make()
    pool = backend.mem_pool_host
    fill(pool, 1)
    wanted = layer_rows(pool, at(1))
    backend.batch_set_v1(HASHES[:4], at(4), after())
    _damage(backend, 1)
    fill(pool, 2)
    assert backend.batch_get_v1(HASHES[:4], at(4)) == [True, False, False, False]
    assert all(torch.equal(a, b) for a, b in zip(wanted, layer_rows(pool, at(1)), strict=True))
    assert backend.errors == {"corrupt-block": 1}
    assert backend.batch_set_v1(HASHES[:4], at(4), after()) == [True] * 4
    assert backend.batch_get_v1(HASHES[:4], at(4)) == [True] * 4


def test_a_lease_that_ends_while_pages_are_copied_makes_them_misses(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    backend.batch_set_v1(HASHES[:2], at(2), after())
    acquire = backend._cache.acquire
    monkeypatch.setattr(backend._cache, "acquire", lambda chain, wait_s: _ReleasedAfterTwoViews(acquire(chain)))
    assert backend.batch_get_v1(HASHES[:2], at(2)) == [False, False]
    assert backend.errors == {"lease-lost": 1}


@pytest.mark.parametrize("error", [TierKVError("no"), OSError("no"), RuntimeError("no")])
def test_whatever_a_cache_does_every_question_is_answered(
    error: Exception, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    for method in ("lookup", "acquire", "reserve", "clear"):
        monkeypatch.setattr(backend._cache, method, fail)
    assert backend.batch_exists(HASHES) == 0
    assert backend.batch_get_v1(HASHES, at(8)) == [False] * 8
    assert backend.batch_set_v1(HASHES, at(8), after()) == [False] * 8
    assert backend.batch_get(HASHES[:2]) == [None, None]
    assert not backend.set(HASHES[0], backend.mem_pool_host.get_dummy_flat_data_page())
    assert not backend.exists(HASHES[0])
    backend.clear()
    assert sum(backend.errors.values()) == 7


def test_nonsense_is_a_miss(make: Make) -> None:
    backend = make()
    assert backend.batch_exists(["not a hash"]) == 0
    assert backend.batch_get_v1(HASHES[:2], at(3)) == [False, False]
    assert backend.batch_set_v1(HASHES[:2], at(1)) == [False, False]
    assert backend.get(HASHES[0], torch.zeros(7)) is None
    assert sum(backend.errors.values()) == 4


def test_a_batch_of_more_than_memory_holds_is_stored_and_read(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hicache, "RESERVED_BYTES", 256 << 10)
    settings = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": "1MiB", "directory": str(tmp_path)},
        "cold": {"capacity": "64MiB", "segment": "8MiB"},
    }
    pool = mha_pool(dim=512, tokens=256)  # pages of 48 KiB: 1 MiB holds 21
    backend = make(pool, {"config": settings, "room_wait_s": 30.0, "wait_s": 30.0})
    hashes = page_hashes(key(range(100 * PAGE)))
    fill(pool, 1)
    wanted = layer_rows(pool, at(100))
    assert backend.batch_set_v1(hashes, at(100), after()) == [True] * 100
    fill(pool, 2)
    assert backend.batch_get_v1(hashes, at(100)) == [True] * 100
    assert all(torch.equal(a, b) for a, b in zip(wanted, layer_rows(pool, at(100)), strict=True))


def test_pages_that_find_no_room_are_said_not_to_be_stored(make: Make) -> None:
    backend = make(mha_pool(dim=512, tokens=256), {"room_wait_s": 0.05})  # 1 MiB holds 21
    hashes = page_hashes(key(range(60 * PAGE)))
    assert backend.batch_set_v1(hashes[:10], at(10), after()) == [True] * 10
    with backend._cache.acquire(backend._chain(hashes[:10])):
        stored = backend.batch_set_v1(hashes[10:], at(50), after(*hashes[:10]))
        assert stored == [True] * 11 + [False] * 39
        assert backend.batch_exists(hashes) == 21


def test_behind_sglangs_failure_injector_it_still_answers_for_every_page(make: Make) -> None:
    backend = HiCacheStorageFailureInjector(make(), 0.0, 0.5)
    for _ in range(30):
        written = backend.batch_set_v1(HASHES, at(8), after())
        read = backend.batch_get_v1(HASHES, at(8), after())
        assert written in ([True] * 8, [False] * 8)
        assert read in ([True] * 8, [False] * 8)
        assert backend.batch_exists(HASHES) in (0, 8)


class _ReleasedAfterTwoViews:
    """A lease that is over when the last of two pages has been copied."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self._views = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def __enter__(self) -> _ReleasedAfterTwoViews:
        return self

    def __exit__(self, *failure: object) -> None:
        self._lease.release()

    def view(self, index: int) -> memoryview:
        if self._views == 2:
            self._lease.release()
        self._views += 1
        found: memoryview = self._lease.view(index)
        return found


def _damage(backend: TierKVHiCache, index: int) -> None:
    """Flip a bit of a stored page in memory."""
    cache: Any = backend._cache
    with cache.acquire(backend._chain(HASHES)) as lease:
        found = lease.blocks[index]
        memory = cache._plane.view(found)
        memory[5] ^= 1
