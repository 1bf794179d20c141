"""`tierkv bench storage`, on sizes too small to tell a speed: every figure is there and nothing is left behind."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tierkv.errors import StorageError
from tierkv.service.bench import storage
from tierkv.service.bench.storage import Scale, bench_storage
from tierkv.service.cli import app

MIB = 1 << 20
TINY = Scale(
    pass_bytes=64 * MIB,
    rounds=1,
    capacity_bytes=48 * MIB,
    fresh_stores=1,
    churn_turns=1,
    evicted_bytes=8 * MIB,
    evicted_rounds=1,
    reload_blocks=1000,
)


def positive(row: dict[str, Any]) -> bool:
    return all(value > 0 for name, value in row.items() if name.endswith("_gbps") and value is not None)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"tierkv-{os.getuid()}-{os.getpid()}-")}


def test_the_command_writes_every_figure_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "QUICK", TINY)
    place = tmp_path / "place"
    place.mkdir()
    done = CliRunner().invoke(
        app, ["bench", "storage", "--quick", "--directory", str(place), "--json", f"{tmp_path}/out.json"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out.json").read_text())
    sizes = (256 << 10, 2 << 20)
    assert figures["memcpy_gbps"] > 0
    for tier in ("hot", "warm"):
        rows = [(row["block_bytes"], row["batch"]) for row in figures[tier]]
        assert rows == [(size, batch) for size in sizes for batch in (1, 32)]
    assert {(row["block_bytes"], row["codec"]) for row in figures["cold"]} == {
        (size, codec) for size in sizes for codec in ("raw", "bx1")
    }
    assert all(positive(row) for part in ("hot", "warm", "cold", "cold_evicted") for row in figures[part])
    for row in figures["cold"]:
        assert row["churn_turns"] == TINY.churn_turns
        assert row["churn_ratio"] == pytest.approx(row["put_gbps"] / row["fresh_put_gbps"])
        assert row["ratio"] == pytest.approx(1, rel=0.01) if row["codec"] == "raw" else row["ratio"] > 1.3
    assert all(row["resident"] < 0.1 and row["start_reads"] >= row["resident"] for row in figures["cold_evicted"])
    assert figures["reload_blocks_per_s"] > 0
    assert not list(place.iterdir())
    assert not shared_memory()


def test_a_directory_that_cannot_be_used_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing") as caught:
        bench_storage(tmp_path / "missing", Console(file=StringIO()), TINY)
    assert caught.value.remedy
