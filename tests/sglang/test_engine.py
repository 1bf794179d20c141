"""A real cache controller of SGLang, its threads and its host pools, with tierkv behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.service.daemon import Daemon, eventually, running
from tests.sglang.released import PAGE, fill, key, layer_rows, mha_pool, mla_pool, page_hashes

POOLS: dict[str, Callable[[str], Any]] = {"mha": mha_pool, "mla": mla_pool}
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
WAYS = [("mha", a, b) for a in (*LAYOUTS, "page_head") for b in (*LAYOUTS, "page_head")]
WAYS += [("mla", a, b) for a in LAYOUTS for b in LAYOUTS]
Attach = Callable[..., Any]


@pytest.mark.parametrize(("kind", "written", "read"), WAYS)
def test_another_engine_finds_pages_whatever_layout_its_memory_has(
    kind: str, written: str, read: str, own: dict[str, Any], attach: Attach
) -> None:
    first, second = attach(POOLS[kind](written), own), attach(POOLS[kind](read), own)
    fill(first.pool, 1)
    fill(second.pool, 2)
    tokens = key(range(9 * PAGE))
    at = first.write(tokens)
    assert first.stored == 9 * PAGE
    loaded, where = second.prefetch(tokens)
    assert loaded == 9 * PAGE
    wanted, found = layer_rows(first.pool, at), layer_rows(second.pool, where)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert not first.backend.errors
    assert not second.backend.errors


@pytest.mark.parametrize("flat", ["written", "read"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "page_head"])
def test_flat_pages_and_pages_in_place_are_the_same_blocks(
    layout: str, flat: str, own: dict[str, Any], attach: Attach
) -> None:
    first = attach(mha_pool(layout), own, zero_copy=flat == "read")
    second = attach(mha_pool(layout), own, zero_copy=flat == "written")
    fill(first.pool, 1)
    tokens = key(range(5 * PAGE))
    at = first.write(tokens)
    assert first.stored == 5 * PAGE
    loaded, where = second.prefetch(tokens)
    assert loaded == 5 * PAGE
    wanted, found = layer_rows(first.pool, at), layer_rows(second.pool, where)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_nobody_shares_across_cache_salts_or_adapters(own: dict[str, Any], attach: Attach) -> None:
    engine = attach(mha_pool(tokens=256), own)
    requests = [(None, None), (None, "a"), (None, "b"), ("lora", None), ("a", None), ("lora", "a")]
    tokens = range(3 * PAGE)
    for number, (adapter, salt) in enumerate(requests):
        asked = [key(tokens, extra_key=e, cache_salt=s) for e, s in requests]
        assert [engine.prefetch(request)[0] for request in asked[number:]] == [0] * (len(requests) - number)
        engine.write(key(tokens, extra_key=adapter, cache_salt=salt))
        assert engine.prefetch(asked[number])[0] == 3 * PAGE


def test_what_follows_a_prefix_that_is_in_host_memory_is_found(own: dict[str, Any], attach: Attach) -> None:
    engine = attach(mha_pool(), own)
    hashes = page_hashes(key(range(8 * PAGE)))
    engine.write(key(range(3 * PAGE)), [])
    engine.write(key(range(3 * PAGE, 8 * PAGE)), hashes[:3], hashes[2])
    assert engine.stored == 5 * PAGE
    rest = key(range(5 * PAGE, 10 * PAGE))
    for prefix_keys in (hashes[:5], None):
        assert engine.prefetch(rest, prefix_keys, hashes[4])[0] == 3 * PAGE


def test_threads_outlive_a_daemon_and_find_the_next_one(own: dict[str, Any], attach: Attach) -> None:
    with running() as daemon:
        engine = attach(mha_pool(), own | {"url": daemon.url, "extra_s": 5.0})
        tokens = key(range(4 * PAGE))
        where = engine.write(tokens)
        daemon.kill()
        assert engine.prefetch(tokens)[0] == 0
        engine.write(key(range(100, 100 + 2 * PAGE)))
        assert engine.stored == 0
        assert all(thread.is_alive() for thread in engine.threads())
        daemon.start()
        eventually(lambda: engine.write_at(where, tokens, None, None) == 4 * PAGE)
        assert engine.prefetch(tokens)[0] == 4 * PAGE


def test_no_daemon_at_all_is_no_reason_not_to_start(own: dict[str, Any], attach: Attach, daemon: Daemon) -> None:
    engine = attach(mha_pool(), own | {"url": f"unix://{daemon.state_dir}/nothing"})
    tokens = key(range(4 * PAGE))
    engine.write(tokens)
    assert engine.stored == 0
    assert engine.prefetch(tokens)[0] == 0
    assert all(thread.is_alive() for thread in engine.threads())


def test_metrics_say_what_was_moved_since_they_were_asked_last(own: dict[str, Any], attach: Attach) -> None:
    engine = attach(mha_pool(), own, metrics=True)
    tokens = key(range(4 * PAGE))
    engine.write(tokens)
    engine.prefetch(tokens)
    told = engine.backend.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([4], [4])
    assert all(rate > 0 for rate in told.backup_bandwidth + told.prefetch_bandwidth)
    assert engine.backend.get_stats().backup_pgs == []


def test_more_than_a_batch_of_pages_is_stored_and_loaded(own: dict[str, Any], attach: Attach) -> None:
    first, second = (attach(mha_pool(tokens=1024), own) for _ in range(2))
    fill(first.pool, 1)
    tokens = key(range(200 * PAGE))
    at = first.write(tokens, [])
    assert first.stored == 200 * PAGE
    loaded, where = second.prefetch(tokens, [])
    assert loaded == 200 * PAGE
    wanted, found = layer_rows(first.pool, at), layer_rows(second.pool, where)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
