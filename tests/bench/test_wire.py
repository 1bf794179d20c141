"""`tierkv bench wire`, on sizes too small to tell a speed: every figure is there and nothing is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.errors import Unavailable
from tierkv.service.bench import wire
from tierkv.service.bench.processes import daemon, ready
from tierkv.service.bench.redis import available
from tierkv.service.bench.wire import WireScale
from tierkv.service.cli import app

MIB = 1 << 20
TINY = WireScale(pass_bytes=64 * MIB, rounds=1, calls=10)
CELLS = [(size, batch) for size in (256 << 10, 2 * MIB) for batch in (1, 32)]


def left() -> tuple[set[str], set[str]]:
    """Shared memory of tierkv, and children of this process that still run."""
    task = f"/proc/self/task/{os.getpid()}/children"
    return {name for name in os.listdir("/dev/shm") if name.startswith("tierkv-")}, set(Path(task).read_text().split())


def test_the_command_writes_every_figure_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "QUICK", TINY)
    _, children = left()
    done = CliRunner().invoke(app, ["bench", "wire", "--quick", "--json", f"{tmp_path}/out.json"])
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert figures["memcpy_gbps"] > figures["loopback_gbps"] > 0
    for way in ("shm", "http", "redis"):
        rows = figures[way]
        wanted = CELLS if way != "redis" or available() else []
        assert [(row["block_bytes"], row["batch"]) for row in rows] == wanted
        assert all(row[name] > 0 for row in rows for name in ("put_gbps", "get_gbps", "yardstick_gbps"))
    singles = ("read_p50_us", "read_p99_us", "acquire_p50_us", "http_p50_us", "lookup_p50_us", "import_ms")
    assert all(figures[name] > 0 for name in singles)
    assert figures["read_p50_us"] <= figures["read_p99_us"]
    assert figures["read_p50_us"] < figures["acquire_p50_us"], "what asks nobody is faster than what does"
    assert left()[1] == children


def test_a_daemon_of_its_own_ends_with_its_context() -> None:
    with daemon({"warm": {"capacity": "2MiB"}}) as (unix, tcp):
        path = Path(unix.removeprefix("unix://"))
        assert path.is_socket()
        assert tcp.startswith("http://127.0.0.1:")
    assert not path.exists()
    assert not path.parent.exists()


def test_a_program_that_does_not_start_is_an_error_that_says_why() -> None:
    with pytest.raises(Unavailable, match="nothing_like_this"), ready("tierkv.service.nothing_like_this"):
        pass
