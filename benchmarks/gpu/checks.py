"""The tests that need a GPU, before anything is measured: figures of wrong results are worth nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["PATHS", "run_checks"]

PATHS = ("tests/gpu", "tests/kernels", "tests/storage")
_ROOT = Path(__file__).parents[2]
_WORKERS = 8  # kernels of many shapes are compiled, each by one processor


def run_checks(limit_s: float, *, expression: str = "gpu", paths: tuple[str, ...] = PATHS) -> bool:
    """Run them, at most so many seconds; say whether all have passed. Prints what pytest does."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", expression, "--no-header", "-rfE", *paths]
    if find_spec("xdist") is not None:
        command += ["-n", str(_WORKERS)]
    compiled = os.environ | {"TRITON_INTERPRET": "0"}  # whatever the tests would conclude from what is installed
    try:
        return not subprocess.run(command, cwd=_ROOT, timeout=limit_s, env=compiled).returncode
    except subprocess.TimeoutExpired:
        print(f"the tests have not ended in {limit_s:g} seconds", flush=True)
        return False
