"""Engines and daemons that several modules need. Without vLLM, as in the environment of `make test`, all is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.engine import Engine, engine
from tests.vllm.models import make_gemma, make_llama

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        absent = pytest.mark.skip(reason="vLLM is not in this environment; make test-vllm has one of its own")
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(absent)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the random models."""
    home = tmp_path_factory.mktemp("models")
    return {"llama": make_llama(home / "llama"), "gemma": make_gemma(home / "gemma")}


@pytest.fixture(scope="session")
def plain(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """Engines without tierkv, by model: what they answer is right."""
    started: dict[str, Engine] = {}
    with ExitStack() as stack:

        def start(name: str) -> Engine:
            if name not in started:
                log = tmp_path_factory.mktemp("plain") / "log"
                started[name] = stack.enter_context(engine(models[name], log))
            return started[name]

        yield start
