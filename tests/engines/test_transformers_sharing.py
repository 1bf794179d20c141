"""What requests share: one prefill for many, a session's name, and namespaces whose blocks come back lossy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tierkv.cache import Cache, Chain, ReadLease
from tierkv.errors import TierFull

transformers = pytest.importorskip("transformers")
pytest.importorskip("tierkv.engines.transformers")

from tests.engines.conftest import FaultyCache  # noqa: E402
from tests.engines.tiny import BLOCK, Setup, gemma, llama, prompt, run  # noqa: E402
from tierkv.engines.transformers import load_prefix, spec_for  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return llama(tmp_path_factory.mktemp("llama"))


@contextmanager
def before_chunk(model: Any, position: int, act: Any) -> Iterator[None]:
    """Call `act` before every forward pass that begins at a position."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        past = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]
        if past.get_seq_length() == position:
            act()

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class Announced(FaultyCache):
    """Sets `asked` when somebody acquires."""

    def __init__(self, inner: Cache) -> None:
        super().__init__(inner)
        self.asked = threading.Event()

    def acquire(self, chain: Chain, **options: Any) -> ReadLease:
        self.asked.set()
        return super().acquire(chain, **options)


def test_identical_cold_requests_prefill_once(setup: Setup, cache: Cache) -> None:
    """The first computes a chunk, the second asks, the first goes on: the second finds all of it."""
    model, spec = setup
    cache.register(spec)
    tokens = prompt(8 * BLOCK + 3)
    second = Announced(cache)
    started = threading.Event()

    def wait_for_the_second() -> None:
        started.set()
        assert second.asked.wait(30)

    with before_chunk(model, 2 * BLOCK, wait_for_the_second), ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, setup, cache, tokens)
        assert started.wait(30)
        waited = run(setup, second, tokens)
        computed = first.result()
    assert computed.tokens == waited.tokens == run(setup, None, tokens).tokens
    assert computed.prefilled_tokens == len(tokens)
    assert waited.prefilled_tokens == 3
    assert cache.stats()["counters"]["compute_leases"]["done"] >= 1


def test_a_prefill_that_fails_lets_the_next_one_compute(setup: Setup, cache: Cache) -> None:
    model, _ = setup
    tokens = prompt(6 * BLOCK + 2)

    def fail() -> None:
        raise RuntimeError("out of memory")

    with before_chunk(model, 2 * BLOCK, fail), pytest.raises(RuntimeError, match="out of memory"):
        run(setup, cache, tokens)
    assert sum(cache.stats()["leases"].values()) == 0
    result = run(setup, cache, tokens, wait_s=60.0)
    assert result.wait_s < 30
    assert result.reused_tokens + BLOCK * result.stored_blocks == 6 * BLOCK


def test_a_slow_chunk_costs_the_promise_and_no_block(setup: Setup, cache: Cache) -> None:
    """The compute lease ends while a chunk is computed; all blocks are stored nevertheless."""
    model, spec = setup
    tokens = prompt(6 * BLOCK + 2)
    ended = threading.Event()

    def outlive_the_lease() -> None:
        while cache.stats()["leases"].get("compute") and not ended.wait(0.01):
            pass

    with before_chunk(model, 3 * BLOCK, outlive_the_lease):
        result = run(setup, cache, tokens, compute_s=0.05)
    assert (result.stored_blocks, result.errors) == (6, ())
    assert cache.lookup(Chain.of(spec, tokens)).blocks == 6
    assert sum(cache.stats()["leases"].values()) == 0


def test_a_corrupt_block_leaves_no_promise_behind(setup: Setup, faulty: FaultyCache, tmp_path: Path) -> None:
    """The promise to compute what follows the hit is given back when the hit turns out to be damaged."""
    _, spec = setup
    tokens = prompt(6 * BLOCK)
    run(setup, faulty, tokens[: 4 * BLOCK + 1], 1)
    with faulty.acquire(Chain.of(spec, tokens)) as lease:
        damaged = lease.blocks[2]
    (memory,) = tmp_path.glob("*.warm")
    with memory.open("r+b") as file:
        file.seek(damaged.offset + damaged.length // 2)
        file.write(b"rot")
    faulty.fail["reserve"] = TierFull("every slot is leased")
    result = run(setup, faulty, tokens, compute_s=60.0)
    assert (result.errors, result.reused_tokens) == (("corrupt-block", "tier-full"), 2 * BLOCK)
    assert sum(faulty.stats()["leases"].values()) == 0


def test_a_request_belongs_to_its_session(setup: Setup, cache: Cache) -> None:
    _, spec = setup
    run(setup, cache, prompt(4 * BLOCK), 1, session="chat-1")
    assert cache.end_session(spec.namespace, "chat-1") == 4


@pytest.fixture(scope="module", params=[llama, gemma], ids=["llama", "windows"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("model")
    return request.param(path)[0], path


@contextmanager
def tiers(directory: Path) -> Iterator[Cache]:
    warm = {"capacity": "8MiB", "directory": str(directory)}
    cold = {"path": str(directory / "cold"), "capacity": "64MiB"}
    with tierkv.open({"warm": warm, "cold": cold, "state_dir": str(directory / "state")}) as opened:
        yield opened


def loaded(setup: Setup, cache: Cache, tokens: list[int]) -> list[torch.Tensor]:
    """Return K and V of every layer, of the tokens the model would look at next."""
    model, spec = setup
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        past, length = load_prefix(model, spec, lease)
    assert length == len(tokens) // BLOCK * BLOCK
    return [plane[:, :, layer.first_seen(length) :] for layer in past.layers for plane in (layer.keys, layer.values)]


@pytest.mark.parametrize(("level", "bound"), [("int8", 0.01), ("eq2", 0.03), ("eq3", 0.1), ("eq4", 0.2)])
def test_a_lossy_namespace_comes_back_close_and_alone(
    any_model: tuple[Any, Path], tmp_path: Path, level: str, bound: float
) -> None:
    """`bound`: the norm of what a plane loses through the cold tier, of the norm of the plane."""
    model, path = any_model
    exact = (model, spec_for(model, path, block_tokens=BLOCK))
    lossy = (model, spec_for(model, path, block_tokens=BLOCK, lossy=level))
    tokens = prompt(6 * BLOCK + 2)
    with tiers(tmp_path) as cache:
        run(lossy, cache, tokens)
        cache.register(exact[1])
        assert cache.lookup(Chain.of(exact[1], tokens)).blocks == 0
        assert run(exact, cache, tokens).reused_tokens == 0
        before = loaded(lossy, cache, tokens)
        assert all(torch.equal(*planes) for planes in zip(before, loaded(exact, cache, tokens), strict=True))
        cache.flush()
    with tiers(tmp_path) as cache:
        for _, spec in (exact, lossy):
            cache.register(spec)
        assert set(cache.lookup(Chain.of(lossy[1], tokens)).tiers) == {"cold"}
        after, same = loaded(lossy, cache, tokens), loaded(exact, cache, tokens)
        answer = run(lossy, cache, tokens)
    assert answer.reused_tokens == 6 * BLOCK
    assert all(torch.equal(*planes) for planes in zip(before, same, strict=True)), "the lossless one is exact"
    losses = [float((new - old).norm() / old.norm()) for new, old in zip(after, before, strict=True)]
    assert 0 < max(losses) < bound


def test_the_first_block_can_stay_exact(any_model: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = any_model
    setup = (model, spec_for(model, path, block_tokens=BLOCK, lossy="eq4", exact_first_block=True))
    tokens = prompt(2 * BLOCK + 1)
    with tiers(tmp_path) as cache:
        run(setup, cache, tokens, 1)
        before = loaded(setup, cache, tokens)
        cache.flush()
    with tiers(tmp_path) as cache:
        cache.register(setup[1])
        after = loaded(setup, cache, tokens)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :, :BLOCK], new[:, :, :BLOCK])
        assert not torch.equal(old, new)
