"""What both benchmarks say about where they ran, and how their figures are written down."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import zstandard

from tierkv import __version__
from tierkv.errors import StorageError

__all__ = ["machine", "write_json"]


def machine() -> str:
    """Return processor, usable cores, system and versions in one line."""
    versions = {
        "tierkv": __version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "LMDB": ".".join(map(str, lmdb.version())),
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
    }
    cores = len(os.sched_getaffinity(0))
    system = f"{cores} cores of {_processor()}, Linux {platform.release().partition('-')[0]}"
    return ", ".join([system, *(f"{name} {version}" for name, version in versions.items())])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write_json(figures: Mapping[str, Any], path: Path) -> None:
    """Write figures as JSON. Raises `StorageError`."""
    try:
        path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", remedy="name a file in a writable directory"
        ) from None
