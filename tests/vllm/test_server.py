"""SmolLM2-135M behind vLLM's HTTP server, in processes of its own for the scheduler and the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.daemon import ROOT, Daemon, running
from tests.vllm.engine import Ask, Engine, engine, eventually, tierkv_config
from tests.vllm.models import find_smollm2
from tests.vllm.server import Server, server

TIERS = {"warm": {"capacity": "256MiB"}, "cold": {"capacity": "256MiB", "segment": "32MiB"}}


@pytest.fixture(scope="module")
def model() -> Path:
    return find_smollm2()


@pytest.fixture(scope="module")
def text(model: Path) -> list[int]:
    """Something to read, in tokens."""
    from tokenizers import Tokenizer

    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode((ROOT / "README.md").read_text()).ids
    return tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(TIERS) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without tierkv."""
    with engine(model, tmp_path_factory.mktemp("alone") / "log") as started:
        yield started


@pytest.fixture(scope="module")
def serving(alone: Engine, model: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server(model, log, tierkv_config(daemon.url)) as started:
        yield started


def test_usage_says_what_came_from_tierkv_and_answers_stay_the_same(
    alone: Engine, serving: Server, daemon: Daemon, text: list[int]
) -> None:
    tokens = text[:700]
    (want,) = alone.run([Ask(tokens, 16)]).tokens
    said, cached = serving.complete(tokens, 16)
    assert (said, cached) == (list(want), 0)

    def reused() -> bool:
        serving.reset()
        said, cached = serving.complete(tokens, 16)
        assert said == list(want)
        return cached == 640  # five blocks of 128 tokens, which is what vLLM takes on a CPU

    eventually(reused)
    with daemon.connect() as cache:
        assert sum(cache.stats()["counters"]["hit_tokens"].values()) >= 640
    metrics = serving.request("GET", "/metrics").decode()
    (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total{")]
    assert float(line.split()[-1]) >= 640


def test_another_salt_finds_nothing(serving: Server, text: list[int]) -> None:
    tokens = text[700:1200]

    def reused() -> bool:
        serving.reset()
        return serving.complete(tokens, 1, cache_salt="mine")[1] == 384

    eventually(reused)
    serving.reset()
    assert serving.complete(tokens, 1, cache_salt="yours")[1] == 0


def test_a_daemon_that_is_killed_costs_nothing_but_the_hits(
    alone: Engine, serving: Server, daemon: Daemon, text: list[int]
) -> None:
    tokens = text[1200:1800]
    (want,) = alone.run([Ask(tokens, 16)]).tokens
    assert serving.complete(tokens, 16)[0] == list(want)
    daemon.kill()
    serving.reset()
    assert serving.complete(tokens, 16) == (list(want), 0)
    daemon.start()

    def reused() -> bool:
        serving.reset()
        said, cached = serving.complete(tokens, 16)
        assert said == list(want)
        return cached == 512

    eventually(reused)
