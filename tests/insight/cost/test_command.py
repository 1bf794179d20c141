"""`tierkv cost` from the outside, and what is wrong with price lists."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.insight.cost.lists import CACHED
from tests.traces import TRACES, needs_traces
from tierkv.errors import ConfigError, InvalidRequest, StorageError
from tierkv.insight.cost.prices import load_prices
from tierkv.insight.cost.traffic import read_traffic

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "configs" / "prices.yml"
HEADING = {"as_of": "2026-11-01", "currency": "EUR"}
OWN = {"gpu_hour": 2, "prefill_tokens_per_s": 8000, "decode_tokens_per_s": 1500}


def tierkv_cost(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierkv.service", "cost", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three turns of one session, the second one first in the file, 1,000 tokens a block."""
    path = tmp_path / "loop.jsonl.gz"
    rows = [(20_000, 30_000, 300), (0, 20_000, 100), (40_000, 40_500, 500)]
    lines = [
        json.dumps(
            {
                "timestamp": at,
                "input_length": tokens,
                "output_length": answer,
                "hash_ids": list(range(-(-tokens // 1000))),
            }
        )
        for at, tokens, answer in rows
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump(HEADING | {"plans": {"cached": CACHED, "own": OWN}}))
    return path


def test_json_has_every_bill(trace: Path, prices: Path) -> None:
    done = tierkv_cost(trace, "--prices", prices, "--block-tokens", "1000", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert (found["as_of"], found["currency"], found["requests"]) == ("2026-11-01", "EUR", 3)
    assert (found["prompt_tokens"], found["distinct_tokens"], found["output_tokens"]) == (90_500, 40_500, 900)
    cached, own = found["bills"]
    assert cached["plan"] == "cached"
    assert cached["tokens"] == {"read": 50_000, "written": 40_000, "plain": 500, "output": 900}
    assert (cached["cached_input"], cached["cache_write"], cached["output"]) == ("0.02", "0.15", "0.01")
    assert Decimal(cached["total"]) == Decimal("0.18")
    assert own["tokens"]["read"] == 0


def test_the_table_has_the_same_figures(trace: Path, prices: Path) -> None:
    done = tierkv_cost(trace, "--prices", prices, "--block-tokens", "1000")
    assert done.returncode == 0, done.stderr
    assert "prices in EUR as of 2026-11-01" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["cached"])
    assert row.split() == ["cached", "0.552", "0.00", "0.02", "0.15", "0.01", "0.00", "0.18"]
    assert "cached: prompts cost 0.17; a flat estimate says 0.27, 1.6 times too much" in done.stdout


def test_answers_follow_their_requests(trace: Path) -> None:
    traffic = read_traffic(trace, 1000)
    assert [request.tokens for request in traffic.trace.requests] == [20_000, 30_000, 40_500]
    assert traffic.answers == (100, 300, 500)
    assert traffic.span_ms() == 40_000


@pytest.mark.parametrize("length", [None, -1, True, "5", 1.5])
def test_a_trace_without_lengths_of_answers_is_refused(tmp_path: Path, length: Any) -> None:
    path = tmp_path / "short.jsonl"
    rows = [{"timestamp": 0, "input_length": 1, "hash_ids": [1], "output_length": answer} for answer in (3, length)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidRequest, match=r"short\.jsonl:2: 'output_length'") as caught:
        read_traffic(path, 512)
    assert caught.value.remedy


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        read_traffic(tmp_path / "nowhere.jsonl", 512)


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ({"a": {"inptu": 1, "output": 2}}, ["plans.a.input: Field required", "plans.a.inptu: unknown key", "'input'"]),
        ({"a": {"input": -1, "output": 2}}, ["plans.a.input"]),
        ({"a": {"input": "dear", "output": 2}}, ["plans.a.input"]),
        ({"a": {"input": True, "output": 2}}, ["plans.a.input: not a number"]),
        ({"a": {"input": float("nan"), "output": 2}}, ["plans.a.input"]),
        ({"a": CACHED | {"ttl": 300}}, ["plans.a.ttl: not a duration", "5min"]),
        ({"a": CACHED | {"ttl": "0s"}}, ["plans.a.ttl"]),
        ({"a": CACHED | {"breakpoints": "many"}}, ["plans.a.breakpoints", "'automatic' or 'prompt'"]),
        ({"a": CACHED | {"minimum_tokens": -1}}, ["plans.a.minimum_tokens"]),
        ({"a": {"input": 1, "output": 2, "ttl": "5min"}}, ["plans.a: ttl without cached_input"]),
        ({"a": {"input": 1, "output": 2, "cached_input": 1}}, ["plans.a: cached_input without ttl"]),
        ({"a": OWN | {"prefill_tokens_per_s": 0}}, ["plans.a.prefill_tokens_per_s"]),
        ({"a": OWN | {"policy": "lfu"}}, ["plans.a", "unknown eviction policy 'lfu'"]),
        ({"a": OWN | {"memory": "much"}}, ["plans.a.memory"]),
        ({"a": 5, "b": {"output": 2}}, ["plans.a", "plans.b.input"]),
        ({}, ["plans: not a mapping"]),
        (3, ["plans: not a mapping"]),
    ],
)
def test_every_wrong_key_is_named(tmp_path: Path, plans: Any, words: list[str]) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump(HEADING | {"plans": plans}))
    with pytest.raises(ConfigError) as caught:
        load_prices(path)
    assert str(path) in caught.value.message
    assert "configs/prices.yml" in caught.value.remedy
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- 1", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("plans: {a: {input: 1, output: 1}}", "as_of: Field required"),
        ("{as_of: soon, currency: EUR, plans: {a: {input: 1, output: 1}}}", "as_of"),
        ("{as_of: 2026-01-01, currency: EUR, plan: {}}", "plan: unknown key"),
        ("{as_of: 2026-01-01, currency: EUR, plans: {a: {input: 1, input: 2}}}", "set twice"),
    ],
)
def test_files_that_are_no_price_lists(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_prices(path)
    assert str(path) in caught.value.message
    assert word in caught.value.message


def test_a_mistake_ends_with_a_remedy(trace: Path, tmp_path: Path) -> None:
    done = tierkv_cost(trace, "--prices", tmp_path / "none.yaml", "--block-tokens", "1000")
    assert done.returncode == ConfigError.exit_code
    assert "none.yaml" in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_without_requests_has_no_bill(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    done = tierkv_cost(empty, "--prices", EXAMPLE)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{empty}: no requests in it" in done.stderr


def test_the_shipped_example_says_that_it_is_one() -> None:
    prices = load_prices(EXAMPLE)
    assert "made-up" in prices.note
    assert "EXAMPLE" in EXAMPLE.read_text()
    assert len(prices.plans) >= 5


@needs_traces
def test_the_example_on_a_coding_agent() -> None:
    trace = TRACES / "weka_claudecode_48s_b512.jsonl.gz"
    done = tierkv_cost(trace, "--prices", EXAMPLE, "--json")
    assert done.returncode == 0, done.stderr
    bills = {bill["plan"]: bill for bill in json.loads(done.stdout)["bills"]}
    assert len({bill["output"] for name, bill in bills.items() if "GPU" not in name}) == 1
    assert 4 < bills["automatic"]["overestimate"] < 7
    assert bills["own GPU, tierkv"]["overestimate"] > 3


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, tierkv.insight.cost.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "aiohttp"} & set(done.stdout.split())
