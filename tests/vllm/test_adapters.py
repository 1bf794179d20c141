"""LoRA adapters: each finds what it computed itself, and nothing of the others or of the model below them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.daemon import running
from tests.vllm.engine import Engine, engine, eventually, prompt, tierkv_config
from tests.vllm.models import make_adapter


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Directories of two adapters, and none."""
    home = tmp_path_factory.mktemp("adapters")
    return ["", str(make_adapter(home / "one", seed=1)), str(make_adapter(home / "two", seed=2))]


@pytest.fixture(scope="module")
def adapting(
    models: dict[str, Path], adapters: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("logs") / "engine"
    with (
        running({"warm": {"capacity": "64MiB"}}) as daemon,
        engine(
            models["llama"], log, tierkv_config(daemon.url), enable_lora=True, max_loras=2, max_lora_rank=8
        ) as started,
    ):
        yield started


def test_adapters_share_nothing(adapting: Engine, adapters: list[str]) -> None:
    tokens = prompt(500)
    said = []
    for lora in adapters:  # every later one could find what the earlier ones have stored
        adapting.reset()
        answer = adapting.ask(tokens, lora=lora)
        assert answer.cached == 0
        said.append(answer.tokens)

        def reused(lora: str = lora, want: tuple[int, ...] = answer.tokens) -> bool:
            adapting.reset()
            again = adapting.ask(tokens, lora=lora)
            assert again.tokens == want
            return again.cached == 448

        eventually(reused)
    assert len(set(said)) == len(adapters)


def test_an_adapter_that_changes_in_place_is_not_looked_for(
    adapting: Engine, adapters: list[str], tmp_path: Path
) -> None:
    tokens = prompt(500, seed=1)
    changing = tmp_path / "three"
    before = adapting.external()
    for seed in (3, 4):
        if changing.exists():
            changing.rename(tmp_path / "old")
        make_adapter(changing, seed=seed)
        for _ in range(2):
            adapting.reset()
            adapting.ask(tokens, lora=str(changing))
    assert adapting.external() == before
