"""An engine with less memory than its requests need, and a cache with less than theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.daemon import Daemon, running
from tests.vllm.engine import Ask, Engine, engine, eventually, prompt, tierkv_config

TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
"""KV of one token of the random Llama."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({"warm": {"capacity": "1MiB"}, "cold": {"capacity": "64MiB", "segment": "16MiB"}}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def cramped(models: dict[str, Path], daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Room for 2,272 tokens: any request fits, but few do at the same time."""
    with engine(
        models["llama"],
        tmp_path_factory.mktemp("logs") / "engine",
        tierkv_config(daemon.url),
        num_gpu_blocks_override=72,
    ) as started:
        yield started


def test_requests_that_are_preempted_are_answered_right(cramped: Engine, plain: Callable[[str], Engine]) -> None:
    stem = prompt(200)
    asks = [Ask(prompt(400, seed=n, after=stem), max_tokens=200) for n in range(20)]
    want = plain("llama").run(asks).tokens
    for _ in range(3):  # cold, then with blocks that are loaded and preempted again
        assert cramped.run(asks).tokens == want
        cramped.reset()
    assert cramped.metrics()["vllm:num_preemptions"] > 0


def test_requests_that_are_aborted_leave_nothing_behind(
    cramped: Engine, plain: Callable[[str], Engine], daemon: Daemon
) -> None:
    stem = prompt(300, seed=100)
    asks = [Ask(prompt(500, seed=100 + n, after=stem), max_tokens=100) for n in range(16)]
    want = plain("llama").run(asks).tokens
    for _ in range(2):
        outcome = cramped.run(asks, abort={n: 1 + 5 * n for n in range(0, 16, 2)})
        for n, answer in enumerate(outcome.answers):
            assert answer.reason == ("length" if n % 2 else "abort")
            assert answer.tokens == want[n][: len(answer.tokens)]
            assert len(answer.tokens) == 100 or n % 2 == 0
        cramped.reset()
    assert cramped.run(asks).tokens == want
    with daemon.connect() as cache:
        eventually(lambda: not any(cache.stats()["leases"].values()))


def test_a_prompt_longer_than_the_warm_tier(cramped: Engine, plain: Callable[[str], Engine], daemon: Daemon) -> None:
    ask = Ask(prompt(1500, seed=200))
    assert len(ask.tokens) * TOKEN_BYTES > 2 << 20
    (want,) = plain("llama").run([ask]).tokens
    cached = []
    for _ in range(3):
        answer = cramped.run([ask]).answers[0]
        assert answer.tokens == want
        cached.append(answer.cached)
        cramped.reset()
    assert cached[0] == 0
