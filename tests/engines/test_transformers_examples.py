"""The examples in docs/examples do what docs/engines.md says they do."""

from __future__ import annotations

import inspect
import runpy
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("tierkv.engines.transformers")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")


def play(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_a_conversation_and_a_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert play("transformers_reuse.py", capsys, monkeypatch) == [
        "first turn: 0 of 200 prompt tokens reused",
        "second turn: 208 of 223 prompt tokens reused",
        "batch: [208, 96, 0] tokens reused",
    ]


@pytest.mark.skipif(
    "cache" not in inspect.signature(transformers.LlamaForCausalLM.forward).parameters, reason="it shows transformers 5"
)
def test_a_loop_of_your_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert play("transformers_loop.py", capsys, monkeypatch) == ["computed: [200, 8]"]
