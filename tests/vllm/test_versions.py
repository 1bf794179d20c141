"""An engine whose interface is another one is refused when it starts, in words, and not in the middle of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.vllm.engine import ENVIRONMENT, PATIENCE_S, ROOT

# One process for all, since importing vLLM takes seconds.
PROGRAM = """
import json, sys
from unittest.mock import patch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

def refusal():
    try:
        from tierkv.engines.vllm import TierKVConnector
    except ImportError as error:
        return str(error)
    return ""

said = {}
with patch.object(vllm, "__version__", "0.99.0"):
    said["version"] = refusal()
with patch.object(vllm, "__version__", "0.31.2"):
    said["older"] = refusal()
with patch.object(Base, "get_num_new_matched_tokens", lambda self, request: 0):
    said["arguments"] = refusal()
results = Base.get_transfer_results
del Base.get_transfer_results
said["method"] = refusal()
Base.get_transfer_results = results
said["none"] = refusal()
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the connector says to each change of vLLM."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("version", "0.99.0"),
        ("older", "0.31.2"),
        ("arguments", "get_num_new_matched_tokens"),
        ("method", "get_transfer_results"),
    ],
)
def test_another_interface_is_refused_by_name(said: dict[str, str], change: str, named: str) -> None:
    assert named in said[change]
    assert "install vllm>=0.32,<0.34" in said[change]


def test_the_interface_as_it_is_is_taken(said: dict[str, str]) -> None:
    assert said["none"] == ""
