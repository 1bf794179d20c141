"""Scheduler's side, worker's side, a real cache and real pages: what is loaded is what was saved, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.paged_engine import (
    BLOCK,
    FULL,
    PAGE,
    PATIENCE_S,
    SLIDING,
    Bench,
    Ran,
    Request,
    opened,
    spec_of,
)
from tierkv.engines.vllm.identity import Named
from tierkv.engines.vllm.link import open_link
from tierkv.engines.vllm.options import parse_options
from tierkv.spec import KVGroup

_COUNT = iter(range(1_000_000))


def request(*tokens: int | list[int]) -> Request:
    flat = [t for part in tokens for t in (part if isinstance(part, list) else [part])]
    return Request(f"r{next(_COUNT)}", flat)


PROMPT = list(range(100, 140))  # five blocks


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened() as found:
        yield found


def test_a_second_request_loads_all_but_the_last_block(bench: Bench) -> None:
    tiny = bench.engine()
    assert tiny.run(request(PROMPT)) == Ran(0, False)
    tiny.settle()
    assert tiny.run(request(PROMPT)) == Ran(4 * BLOCK, False)
    assert tiny.run(request(PROMPT, 7)) == Ran(5 * BLOCK, False)
    assert tiny.run(request(PROMPT[:20], 1, 2, 3, 4, 5)) == Ran(2 * BLOCK, False)
    tiny.settle()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 44),
            st.integers(1, 20),
            st.integers(0, 5),
            st.sampled_from([3, 8, 17, 99]),
        ),
        min_size=2,
        max_size=8,
    ),
    sliding=st.booleans(),
)
def test_any_mixture_of_prefixes_chunks_and_local_hits_loads_what_the_tokens_say(
    prompts: list[tuple[int, int, int, int, int]], sliding: bool
) -> None:
    with opened() as found:
        tiny = found.engine(spec_of(FULL, SLIDING) if sliding else spec_of(FULL))
        for family, shared, own, local, chunk in prompts:
            tokens = [family * 1000 + n for n in range(shared)] + [5000 + family * 100 + n for n in range(own)]
            asked = request(tokens)
            pages = min(local, (len(tokens) - 1) // PAGE)
            tiny.run(asked, local=pages * PAGE, chunk=chunk)
            tiny.settle()
            repeated = tiny.run(request(tokens))
            assert not repeated.failed
            if not sliding or not pages:
                assert repeated.external == (len(tokens) - 1) // BLOCK * BLOCK
            tiny.settle()


def test_pages_that_are_there_already_are_not_written(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    # Three pages are the engine's own: the load begins in the middle of the second block. `run` checks every page.
    assert tiny.run(request(PROMPT), local=3 * PAGE) == Ran(4 * BLOCK - 3 * PAGE, False)
    assert tiny.run(request(PROMPT), local=8 * PAGE) == Ran(0, False)


def test_tokens_that_were_generated_are_stored_too(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT), chunk=1)
    tiny.settle()
    assert tiny.run(request(PROMPT, 7)).external == 5 * BLOCK


def test_tokens_that_are_only_drafted_are_not_stored(bench: Bench) -> None:
    tiny = bench.engine()
    asked = request(PROMPT[:-1])
    tiny.scheduler.new_request(asked)
    assert tiny.ask(asked) == 0
    drafts = 12
    (order,) = tiny.order(asked, tiny.pages(asked, 0), asked.num_tokens + drafts).saves
    assert len(order.hashes) == 4  # the fifth block is not known yet
    tiny.scheduler.finished(asked)


def test_other_weights_share_nothing(bench: Bench) -> None:
    one, other = bench.engine(), bench.engine(spec_of(FULL, SLIDING, weights="new"))
    one.run(request(PROMPT))
    one.settle()
    assert other.run(request(PROMPT)) == Ran(0, False)
    other.settle()
    assert other.run(request(PROMPT)).external == 4 * BLOCK


def test_a_reset_leaves_the_past_behind(bench: Bench) -> None:
    tiny, other = bench.engine(), bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    tiny.scheduler.reset()
    assert tiny.run(request(PROMPT)) == Ran(0, False)
    tiny.settle()
    assert tiny.run(request(PROMPT)).external == 4 * BLOCK
    tiny.run(request(PROMPT[::-1]))
    tiny.settle()
    assert other.run(request(PROMPT[::-1])).external == 0  # weights in memory were changed: nobody else has those
    assert other.run(request(PROMPT)).external == 4 * BLOCK


def test_ranks_load_as_far_as_the_shortest_of_them(bench: Bench) -> None:
    specs = [spec_of(FULL, SLIDING, rank=rank, ranks=2) for rank in range(2)]
    both = bench.engine(*specs)
    first = bench.engine(specs[0])
    first.run(request(PROMPT))
    first.settle()
    assert both.run(request(PROMPT)) == Ran(0, False)  # the second rank has nothing
    both.settle()
    assert both.run(request(PROMPT)) == Ran(4 * BLOCK, False)
    first.run(request(PROMPT, PROMPT))
    first.settle()
    assert both.run(request(PROMPT, PROMPT)) == Ran(5 * BLOCK, False)
    both.settle()


def test_damage_fails_the_load_and_is_repaired_by_computing(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    hashes = request(PROMPT).block_hashes[BLOCK // PAGE - 1 :: BLOCK // PAGE]
    with bench.link.cache.acquire(Named.of(tiny.specs[0], "").chain(hashes)) as lease:
        memory, _ = bench.link.cache.engine.placement.memory[-1].tier.shared()  # type: ignore[union-attr]
        memory[lease.blocks[2].offset] ^= 1
    assert tiny.run(request(PROMPT)) == Ran(4 * BLOCK, True)
    tiny.settle()
    assert bench.link.cache.stats()["counters"]["corrupt_blocks"]
    assert tiny.run(request(PROMPT)) == Ran(4 * BLOCK, False)


def test_what_does_not_fit_into_staging_memory_is_not_stored(bench: Bench) -> None:
    block = sum(spec_of(FULL).layout(0).nbytes for _ in "x")
    with opened(staging_bytes=2 * block) as found:
        tiny = found.engine(spec_of(FULL))
        release = Event()
        tiny.workers[0]._saver.submit(release.wait)
        tiny.run(request(PROMPT))
        release.set()
        tiny.settle()
        assert found.link.take_counts()["blocks_dropped"] == 3
        assert tiny.run(request(PROMPT)).external == 2 * BLOCK
        tiny.settle()
        tiny.run(request(PROMPT), chunk=BLOCK)


def test_what_finds_no_room_is_not_stored_nor_what_follows_it() -> None:
    large = spec_of(KVGroup((0,), "full", 1, 8192))  # half a MiB per block
    with opened(config={"warm": {"capacity": "2MiB"}}, staging_bytes="8MiB") as bench:
        tiny = bench.engine(large)
        tiny.run(request(PROMPT[: 2 * BLOCK]))
        tiny.settle()
        hashes = request(PROMPT[: 2 * BLOCK]).block_hashes[BLOCK // PAGE - 1 :: BLOCK // PAGE]
        with bench.link.cache.acquire(Named.of(large, "").chain(hashes)) as held:
            assert held.hit_blocks == 2
            tiny.run(request(PROMPT[::-1]))
            tiny.workers[0]._saver.submit(lambda: None).result(PATIENCE_S)
        counts = bench.link.take_counts()
        assert counts["blocks_without_room"] >= 2
        assert counts["blocks_stored"] + counts["blocks_without_room"] == 2 + 5
        assert "save_failed" not in counts


class Stuck:
    """A cache whose answers take until they are released."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.go = Event()

    def acquire(self, *arguments: Any, **options: Any) -> Any:
        assert self.go.wait(PATIENCE_S)
        return self._inner.acquire(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_late_answer_is_not_waited_for_and_holds_nothing(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    stuck = bench.link.cache = Stuck(bench.link.cache)  # type: ignore[assignment]
    hasty = bench.engine(wait_s=0.01, extra_s=0.01)
    asked = request(PROMPT)
    assert hasty.run(asked) == Ran(0, False)
    aborted = request(PROMPT)
    hasty.scheduler.new_request(aborted)
    assert hasty.scheduler.matched_tokens(aborted, 0) == (None, False)
    hasty.scheduler.finished(aborted)
    stuck.go.set()
    hasty.settle()
    hasty.settle()


def test_a_failing_cache_is_a_miss(bench: Bench) -> None:
    tiny = bench.engine()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("gone")

    broken = SimpleNamespace(**dict.fromkeys(("acquire", "reserve", "register", "prefetch", "lookup"), fail))
    broken.stats = bench.link.cache.stats
    bench.link.cache = broken  # type: ignore[assignment]
    assert tiny.run(request(PROMPT)) == Ran(0, False)
    tiny.settle()
    counts = bench.link.take_counts()
    assert counts["acquire_failed"] == 1
    assert counts["save_failed"] >= 1


def test_a_request_that_could_not_be_loaded_is_not_asked_about_again(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    asked = request(PROMPT)
    tiny.scheduler.new_request(asked)
    external = tiny.ask(asked)
    tiny.scheduler.allocated(asked, tiny.pages(asked, external), external)
    tiny.scheduler.arrived({asked.request_id}, {asked.request_id})
    assert tiny.scheduler.matched_tokens(asked, 0) == (0, False)
    asked.num_preemptions += 1
    assert tiny.scheduler.matched_tokens(asked, 0) == (0, False)


def test_a_preempted_request_is_asked_about_again(bench: Bench) -> None:
    tiny = bench.engine()
    asked = request(PROMPT)
    tiny.scheduler.new_request(asked)
    assert tiny.ask(asked) == 0
    tiny.run(request(PROMPT))
    tiny.settle()
    assert tiny.ask(asked) == 0  # the same stay: settled
    asked.num_preemptions += 1
    assert tiny.ask(asked) == 4 * BLOCK


def test_neighbours_with_one_prompt_save_it_once() -> None:
    with opened(staging_bytes=5 * spec_of(FULL).layout(0).nbytes) as bench:
        tiny = bench.engine(spec_of(FULL))
        release = Event()
        tiny.workers[0]._saver.submit(release.wait)
        tiny.run(request(PROMPT))
        tiny.run(request(PROMPT, 1, 2, 3), local=5 * BLOCK)  # whose prefix is in pages, and on its way to the cache
        release.set()
        tiny.settle()
        counts = bench.link.take_counts()
        assert counts["blocks_stored"] == 5
        assert "blocks_dropped" not in counts  # a second copy would have found no staging memory
        tiny.scheduler.reset()
        tiny.run(request(PROMPT, 1), local=5 * BLOCK)
        tiny.settle()
        assert tiny.run(request(PROMPT, 1)).external == 5 * BLOCK  # saved again, under its new name


def test_requests_that_wait_are_prefetched(tmp_path: Path) -> None:
    config = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": "8MiB"},
        "cold": {"path": str(tmp_path / "cold"), "capacity": "64MiB", "segment": "16MiB"},
    }
    with opened(config=config) as found:
        tiny = found.engine(spec_of(FULL))
        tiny.run(request(PROMPT))
        tiny.settle()
    with opened(config=config) as found:
        tiny = found.engine(spec_of(FULL))
        waiting = request(PROMPT)
        tiny.scheduler.new_request(waiting)
        tiny.pass_by()
        deadline = monotonic() + PATIENCE_S
        while not found.link.cache.stats()["counters"]["promoted_blocks"]:
            assert monotonic() < deadline
        assert tiny.run(request(PROMPT)).external == 4 * BLOCK


def test_an_adapter_has_a_chain_of_its_own_while_its_files_are_old(bench: Bench, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()

    def run() -> int:
        asked = request(PROMPT)
        asked.lora_request = SimpleNamespace(lora_path=str(adapter))
        external = tiny.run(asked).external
        tiny.settle()
        return external

    assert (run(), run()) == (0, 4 * BLOCK)
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert (run(), run()) == (0, 0)  # nobody knows which of the two the engine has read
    fresh = bench.engine()
    asked = request(PROMPT)
    asked.lora_request = SimpleNamespace(lora_path=str(adapter))
    assert fresh.run(asked).external == 0


def test_an_embedded_cache_is_closed_with_its_last_user() -> None:
    options = parse_options({"config": {"warm": {"capacity": "4MiB"}}})
    one, two = open_link(options, "shared"), open_link(options, "shared")
    assert one.cache is two.cache
    one.close()
    assert two.cache.stats()
    two.close()
    fresh = open_link(options, "shared")
    assert fresh.cache is not one.cache
    fresh.close()


def test_requests_that_end_at_once_hold_nothing(bench: Bench) -> None:
    tiny = bench.engine()
    tiny.run(request(PROMPT))
    tiny.settle()
    asked = [request(PROMPT) for _ in range(20)]
    for one in asked:
        tiny.scheduler.new_request(one)
        tiny.scheduler.matched_tokens(one, 0)
    for one in asked:
        tiny.scheduler.finished(one)
    tiny.settle()
