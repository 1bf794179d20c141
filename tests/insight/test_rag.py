"""docs/examples/rag.py finds what docs/rag.md says: the order of a prompt's parts decides what is reused."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for package in ("transformers", "gguf", "accelerate"):
    pytest.importorskip(package)
model = pytest.importorskip("tierkv.service.demo.model")

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(\w+) +([\d,]+) of ([\d,]+) prompt tokens reused")


@pytest.fixture
def threads() -> Iterator[None]:
    """The example takes all processors, and later tests are to find what they expect."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def found(text: str) -> dict[str, tuple[int, int]]:
    """Return reused and all tokens by way of building prompts."""
    return {
        name: (int(reused.replace(",", "")), int(total.replace(",", ""))) for name, reused, total in LINE.findall(text)
    }


@pytest.mark.usefixtures("threads")
def test_stable_parts_first_are_reused(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        model.find_checkpoint()
    except ImportError:
        pytest.skip("the demo's model is not installed")
    runpy.run_path(str(ROOT / "docs" / "examples" / "rag.py"), run_name="__main__")
    said = found(capsys.readouterr().out)
    assert said["naive"][0] == 0
    assert said["stable"][0] > 0.6 * said["stable"][1]
    documented = found((ROOT / "docs" / "rag.md").read_text())
    assert said == documented, "docs/rag.md shows another run"
