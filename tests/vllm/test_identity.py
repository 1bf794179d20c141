"""Whose KV it is: a checkpoint that changes in place has another namespace. In embedded mode, which has no daemon."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import tierkv
from tests.vllm.engine import PATIENT, Ask, Engine, engine, prompt, tierkv_config
from tests.vllm.models import make_llama


def test_a_weight_file_that_changes_in_place_is_another_model(
    models: dict[str, Path], plain: Callable[[str], Engine], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    config = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": "16MiB"},
        "cold": {"capacity": "64MiB", "segment": "16MiB"},
    }
    ask = Ask(prompt(500))
    (want,) = plain("llama").run([ask]).tokens
    with engine(model, tmp_path / "first.log", tierkv_config("", config=config, **PATIENT)) as first:
        assert first.run([ask]).tokens == [want]
        first.reset()
        answer = first.run([ask]).answers[0]
        assert answer.tokens == want
        assert first.stop() == 0
    with tierkv.open(config) as cache:
        assert cache.stats()["published_blocks"] >= 7  # it is all there, and must not be found
    other = make_llama(tmp_path / "other", seed=1)
    weights = "model.safetensors"
    shutil.copy(other / weights, model / weights)
    with engine(model, tmp_path / "second.log", tierkv_config("", config=config, **PATIENT)) as second:
        cold = second.run([ask]).answers[0]
        assert (cold.cached, second.external()) == (0, 0)
        assert cold.tokens != want
        second.reset()
        assert second.run([ask]).tokens == [cold.tokens]
