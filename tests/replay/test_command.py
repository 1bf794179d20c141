"""`tierkv replay` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.replay import simulators as slow
from tierkv.replay.costs import Costs, Times, worth
from tierkv.replay.trace import Request, Trace

ROOT = Path(__file__).parents[2]
KEYS = {
    *("requests", "prompt_tokens", "hit_tokens", "hit_rate"),
    *("ideal_hit_tokens", "belady_hit_tokens", "refs_per_s"),
}
TIER_KEYS = {"tiers", "disk_written_bytes", "prefill_saved_s", "load_s", "ttft_s", "ttft_uncached_s"}
TRACE = slow.generated_trace(2)


def tierkv_replay(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierkv.service", "replay", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "generated.jsonl"
    with path.open("w") as file:
        for request in TRACE.requests:
            row = {"timestamp": request.timestamp, "input_length": request.tokens, "hash_ids": request.blocks}
            file.write(json.dumps(row | {"session_id": request.session}) + "\n")
    return path


def test_json_is_all_there_is_on_stdout(trace: Path) -> None:
    done = tierkv_replay(trace, "--block-tokens", "4", "--policy", "lru", "--capacity-blocks", "30", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout)
    assert set(figures) == KEYS
    assert figures["requests"] == len(TRACE.requests)
    assert figures["hit_tokens"] == slow.slow_lru(TRACE, 30)
    assert figures["belady_hit_tokens"] == slow.slow_belady(TRACE, 30)
    assert figures["ideal_hit_tokens"] == slow.slow_ideal(TRACE)
    assert figures["hit_rate"] == figures["hit_tokens"] / TRACE.prompt_tokens()
    assert figures["refs_per_s"] > 0


def test_the_table_has_the_same_figures(trace: Path) -> None:
    options = (trace, "--block-tokens", "4", "--policy", "slru", "--protected", ".5", "--ghost", "2", "--end-hints")
    table = tierkv_replay(*options)
    figures = json.loads(tierkv_replay(*options, "--json").stdout)
    assert table.returncode == 0, table.stderr
    for name in ("hit_tokens", "belady_hit_tokens", "ideal_hit_tokens"):
        assert f"{figures[name]:,}" in table.stdout
    assert "slru protected=0.5 ghost=2" in table.stdout


def test_tiers_of_a_configuration(trace: Path, tmp_path: Path) -> None:
    block = 1 << 20
    config = tmp_path / "daemon.yaml"
    tiers = {
        "hot": {"capacity": 10 * block, "policy": "lru"},
        "warm": {"capacity": 30 * block, "policy": {"name": "slru", "protected": 0.5}},
        "cold": {"capacity": 90 * block},
    }
    config.write_text(yaml.safe_dump(tiers))
    options = (
        trace,
        "--block-tokens",
        "4",
        "--config",
        config,
        "--bytes-per-token",
        str(block // 4),
        "--prefill",
        "100",
    )
    done = tierkv_replay(*options, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == KEYS | TIER_KEYS
    assert [(tier["name"], tier["capacity_blocks"]) for tier in figures["tiers"]] == [
        ("hot", 10),
        ("warm", 30),
        ("cold", 90),
    ]
    assert sum(tier["hit_tokens"] for tier in figures["tiers"]) == figures["hit_tokens"]
    assert figures["belady_hit_tokens"] == slow.slow_belady(TRACE, 90)
    assert figures["disk_written_bytes"] % block == 0
    assert figures["disk_written_bytes"] >= (TRACE.unique_blocks() - 30) * block
    assert figures["prefill_saved_s"] == pytest.approx(figures["hit_tokens"] / 100)
    for when in ("mean", "p50", "p95"):
        assert figures["ttft_s"][when] <= figures["ttft_uncached_s"][when]
    table = tierkv_replay(*options)
    assert table.returncode == 0, table.stderr
    assert all(word in table.stdout for word in ("daemon.yaml", "from cold (90 blocks)", "without the cache"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "slur"], ["'slur'", "did you mean 'slru'?"]),
        (["--policy", "belady"], ["unknown eviction policy"]),
        (["--policy", "lru", "--ghost", "2"], ["no parameter 'ghost'"]),
        (["--protected", "2"], ["from 0 to 1"]),
        (["--capacity", "5"], ["--capacity-blocks"]),
        (["--capacity", "5%", "--capacity-blocks", "5"], ["exclude each other"]),
        (["--config", "none.yaml"], ["none.yaml"]),
        (["--config", "none.yaml", "--policy", "lru"], ["--config"]),
    ],
)
def test_mistakes_end_with_a_remedy(trace: Path, options: list[str], words: list[str]) -> None:
    done = tierkv_replay(trace, "--block-tokens", "4", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "remedy:" in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_wrong_block_size_is_noticed(trace: Path) -> None:
    done = tierkv_replay(trace)
    assert done.returncode == 2
    assert f"{trace}:1" in done.stderr
    assert "--block-tokens" in done.stderr


def test_what_hits_are_worth() -> None:
    trace = Trace((Request(0, 1000, (1, 2)), Request(1, 600, (1, 3))), 512)
    saved = worth(trace, ("warm", "cold"), ((0, 0), (400, 100)), Costs(10, 100.0, {"warm": 8000.0, "cold": 500.0}))
    assert saved.prefill_saved_s == pytest.approx(5.0)
    assert saved.load_s == pytest.approx(0.5 + 2.0)
    assert saved.uncached == Times(8.0, 8.0, pytest.approx(9.8))
    assert saved.cached == Times(pytest.approx((10 + 3.5) / 2), pytest.approx(6.75), pytest.approx(9.675))
