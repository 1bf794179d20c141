"""Other processes that a benchmark needs beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierkv.errors import Unavailable

__all__ = ["daemon", "ready"]

_STOP_S = 30.0


@contextmanager
def ready(module: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Run a module of ours as a program; yield the line with which it says that it is ready. Ended by SIGTERM.

    Raises `Unavailable` when it ends without such a line.
    """
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if "ready on " in line), None)
        if line is None:
            _, said = process.communicate()
            raise Unavailable(f"{module} did not start: {said.strip()[-500:]}", remedy="see its message")
        yield line.strip().partition("ready on ")[2]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def daemon(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Run a daemon; yield its URLs, of a Unix socket and of TCP. Raises `Unavailable` when it does not start."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        config = Path(home) / "config.yaml"  # JSON is YAML
        config.write_text(json.dumps({"socket": f"{home}/s", "port": 0, **settings}), encoding="utf-8")
        with ready("tierkv.service", ["serve", "--config", str(config)]) as addresses:
            unix, tcp = addresses.split(", ")
            yield unix, tcp
