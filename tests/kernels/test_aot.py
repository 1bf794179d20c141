"""What the kernels compile to, ahead of time and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    program = [sys.executable, "-m", "tests.kernels.aot"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles_for_every_architecture(compiled: list[dict[str, Any]]) -> None:
    assert {row["sm"] for row in compiled} == {80, 90, 100}
    by_case = {(row["case"], row["kernel"], row["sm"]) for row in compiled}
    assert len(by_case) >= 3 * 36


def test_memory_is_accessed_in_the_width_that_the_alignment_allows(compiled: list[dict[str, Any]]) -> None:
    bounded = [row for row in compiled if row["width"]]
    assert sum(row["width"] == 128 for row in bounded) >= 3 * 32
    for row in bounded:
        assert (set(row["loads"]) | set(row["stores"])) == {str(row["width"])}, row
        assert all(count > 0 for count in (*row["loads"].values(), *row["stores"].values())), row


def test_nothing_spills(compiled: list[dict[str, Any]]) -> None:
    assert not [row for row in compiled if row["stack"]]


def test_registers_stay_within_their_bounds(compiled: list[dict[str, Any]]) -> None:
    assert not [row for row in compiled if row["registers"] > row["most_registers"]]


def test_every_case_is_in_the_documented_table(compiled: list[dict[str, Any]]) -> None:
    documented = (ROOT / "docs/kernels.md").read_text()
    missing = {row["case"] for row in compiled if f"| {row['case']} | `{row['kernel']}` |" not in documented}
    assert not missing, "run TRITON_INTERPRET=0 python -m tests.kernels.aot --document"
