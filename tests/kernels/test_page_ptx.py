"""What the page kernel compiles to, ahead of time and without a GPU."""

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
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(ROOT / "tests/kernels/aot.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_compiles_for_every_architecture(compiled: list[dict[str, Any]]) -> None:
    assert {row["sm"] for row in compiled} == {80, 90, 100}
    assert {row["kernel"] for row in compiled} == {"gather", "scatter"}


def test_aligned_caches_are_moved_128_bits_at_a_time(compiled: list[dict[str, Any]]) -> None:
    aligned = [row for row in compiled if "off" not in row["case"]]
    assert len(aligned) >= 36
    for row in aligned:
        assert (row["unit"], set(row["ld"]), set(row["st"])) == (16, {"128"}, {"128"}), row


def test_misaligned_caches_are_moved_in_the_widest_words_that_are_aligned(compiled: list[dict[str, Any]]) -> None:
    for case, unit in (("8 bytes off", 8), ("2 bytes off", 2)):
        found = [row for row in compiled if case in row["case"]]
        assert found
        for row in found:
            assert (row["unit"], set(row["ld"]), set(row["st"])) == (unit, {str(8 * unit)}, {str(8 * unit)}), row
