"""Layouts side by side: their arithmetic, the published traces, and `tierkv replay --nodes` from the outside."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.replay import simulators as slow
from tests.replay.test_command import tierkv_replay
from tests.traces import TRACES, needs_traces
from tierkv.errors import ConfigError, InvalidRequest
from tierkv.replay.costs import Costs
from tierkv.replay.layouts import LAYOUTS, LayoutOutcome, Routing, run_layouts
from tierkv.replay.link import Link, parse_bytes
from tierkv.replay.shared import SharedPlan, parse_write
from tierkv.replay.single import ideal_hit_tokens
from tierkv.replay.tiers import MemoryPlan, TierPlan
from tierkv.replay.trace import Request, Trace, read_trace

LINK = Link(bandwidth=1000.0, latency=0.5, block_bytes=500, prefill=2.0)
COSTS = Costs(bytes_per_token=100, prefill=2.0, bandwidths={"warm": 800.0, "cold": 80.0})
TRACE = slow.generated_trace(4)


def layouts(trace: Trace, nodes: int, local: TierPlan, shared: SharedPlan, *names: str) -> dict[str, LayoutOutcome]:
    outcome = run_layouts(trace, names or LAYOUTS, nodes, local, shared, LINK, COSTS, Routing())
    return {layout.layout: layout for layout in outcome.layouts}


def memory(blocks: int, policy: str = "lru") -> TierPlan:
    return TierPlan((MemoryPlan("warm", blocks, policy),), 0, 0.0)


def test_sums_by_hand() -> None:
    # Node 0 computes 1 and 2; node 1 loads them (4 s of prefill against .5 + 1) and computes 3; node 0 loads 3.
    requests = [(0, (1, 2), 8), (1, (1, 2, 3), 12), (4, (1, 2, 3), 12)]
    trace = Trace(tuple(Request(1000.0 * at, tokens, blocks) for at, blocks, tokens in requests), 4)
    shared = layouts(trace, 2, memory(8), SharedPlan(), "shared")["shared"]
    assert shared.hit_tokens == 20
    assert [tier.hit_tokens for tier in shared.tiers] == [8, 12]
    assert [(node.requests, node.prompt_tokens, node.tier_tokens) for node in shared.nodes] == [
        (2, 20, (8, 4)),
        (1, 12, (0, 8)),
    ]
    assert [(node.loaded_bytes, node.stored_bytes) for node in shared.nodes] == [(500, 1000), (1000, 500)]
    assert shared.shared is not None
    assert (shared.shared.loaded_bytes, shared.shared.stored_bytes, shared.shared.blocks) == (1500, 1500, 3)
    assert (shared.shared.lookups, shared.shared.keys, shared.shared.unpaid_tokens) == (3, 2 + 3 + 1, 0)
    assert shared.shared.node_link == pytest.approx(1000 / 4 / 1000)
    assert shared.shared.engine_link == pytest.approx(1500 / 4 / 1000)
    assert shared.prefill_saved_s == pytest.approx(20 / 2)
    assert shared.load_s == pytest.approx(8 * 100 / 800 + (0.5 + 1.0) + (0.5 + 0.5))
    assert shared.imbalance == pytest.approx(8 / 6)


def test_what_arrives_at_once_has_no_rate() -> None:
    trace = Trace((Request(0, 4, (1,)), Request(0, 4, (1,))), 4)
    shared = layouts(trace, 2, memory(1), SharedPlan(), "shared")["shared"].shared
    assert shared is not None
    assert shared.node_link is shared.engine_link is None


def test_layouts_differ_by_router_and_tier_only() -> None:
    found = layouts(TRACE, 4, memory(60), SharedPlan(200))
    assert list(found) == list(LAYOUTS)
    assert found["private"].shared is found["routed"].shared is None
    assert found["private"].tiers[0] == found["shared"].tiers[0]
    assert found["both"].tiers[0] != found["shared"].tiers[0]
    assert found["both"].shared is not None
    assert [node.requests for node in found["private"].nodes] == [node.requests for node in found["shared"].nodes]
    assert found["private"].hit_tokens < found["shared"].hit_tokens <= ideal_hit_tokens(TRACE)
    assert found["private"].hit_tokens < found["routed"].hit_tokens <= found["both"].hit_tokens
    for layout in found.values():
        assert sum(node.hit_tokens for node in layout.nodes) == sum(tier.hit_tokens for tier in layout.tiers)
        assert sum(node.requests for node in layout.nodes) == len(TRACE.requests)


def test_an_empty_trace() -> None:
    with pytest.raises(InvalidRequest, match="no blocks"):
        layouts(Trace(()), 2, memory(1), SharedPlan())


def test_options_in_words() -> None:
    assert parse_write("hits:12") == ("hits", 12)
    assert parse_write("all")[0] == "all"
    assert parse_write("demotion")[0] == "demotion"
    for wrong in ("", "hits", "hits:0", "hits:", "hits:1.5", "some"):
        with pytest.raises(ConfigError, match="what to write"):
            parse_write(wrong)
    assert parse_bytes("10Gbit", "--link") == 1_250_000_000
    assert parse_bytes("42 MiB", "--block-bytes") == 42 << 20
    for wrong in ("", "fast", "-5GB", "0", "nan", "1e400"):
        with pytest.raises(ConfigError, match="--link"):
            parse_bytes(wrong, "--link")


@cache
def public(name: str) -> Trace:
    return read_trace(TRACES / f"mooncake_{name}_full.jsonl.gz")


def rates(name: str, local: str, shared: str, **routing: Any) -> dict[str, float]:
    trace = public(name)
    link = Link(1.25e9, 0.001, 512 * 131072 * 2 // 3, 8000)
    costs = Costs(131072, 8000, {"warm": 20e9})
    unique = trace.unique_blocks()
    outcome = run_layouts(
        trace,
        ("private", "routed", "shared"),
        8,
        memory(int(unique * float(local.strip("%")) / 100)),
        SharedPlan(int(unique * float(shared.strip("%")) / 100)),
        link,
        costs,
        Routing(**routing),
    )
    return {layout.layout: outcome.rate(layout.hit_tokens) for layout in outcome.layouts}


@needs_traces
@pytest.mark.parametrize(("name", "apart", "together"), [("conversation", 0.136, 0.374), ("synthetic", 0.237, 0.651)])
@pytest.mark.parametrize("seed", [None, 1])
def test_eight_caches_that_never_evict(name: str, apart: float, together: float, seed: int | None) -> None:
    found = rates(name, "100%", "100%", seed=seed)
    assert found["private"] == pytest.approx(apart, abs=0.01)
    assert found["shared"] == pytest.approx(together, abs=0.001)


@needs_traces
@pytest.mark.parametrize("local", ["1%", "5%", "10%"])
def test_a_shared_tier_makes_up_for_small_nodes(local: str) -> None:
    found = rates("conversation", local, "50%")
    assert found["private"] < 0.14
    assert found["shared"] > 0.37
    assert rates("synthetic", local, "50%")["shared"] > 0.59


@needs_traces
def test_a_router_finds_nearly_everything_and_burdens_nobody() -> None:
    """All prompts of this trace begin with the same block."""
    trace = public("conversation")
    outcome = run_layouts(trace, ["routed"], 8, memory(9139), SharedPlan(), LINK, COSTS, Routing())
    assert outcome.rate(outcome.layouts[0].hit_tokens) > 0.36
    assert outcome.layouts[0].imbalance < 1.05


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "generated.jsonl"
    rows = (
        {"timestamp": 1000 * request.timestamp, "input_length": request.tokens, "hash_ids": request.blocks}
        for request in TRACE.requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_of_the_command(trace_file: Path) -> None:
    options = ("--block-tokens", "4", "--nodes", "3", "--capacity-blocks", "60", "--policy", "lru", "--spread", "1.2")
    more = ("--shared-blocks", "200", "--write", "demotion", "--link", "1Gbit", "--latency-ms", "0.1")
    done = tierkv_replay(trace_file, *options, *more, "--block-bytes", "4KiB", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout)
    assert set(figures) == {"requests", "prompt_tokens", "ideal_hit_tokens", "span_s", "layouts"}
    assert [layout["layout"] for layout in figures["layouts"]] == list(LAYOUTS)
    link = Link(1.25e8, 0.0001, 4096, 8000)
    costs = Costs(131072, 8000, {"warm": 20e9})
    expected = run_layouts(
        Trace(tuple(Request(1000 * r.timestamp, r.tokens, r.blocks) for r in TRACE.requests), 4),
        *(LAYOUTS, 3, memory(60), SharedPlan(200, "demotion"), link, costs, Routing(None, 1.2)),
    ).as_json()
    for one in (figures, expected):
        for layout in one["layouts"]:
            assert layout.pop("refs_per_s") > 0
    assert figures == json.loads(json.dumps(expected))


def test_tables_of_the_command(trace_file: Path, tmp_path: Path) -> None:
    table = tierkv_replay(trace_file, "--block-tokens", "4", "--nodes", "3")
    assert table.returncode == 0, table.stderr
    words = [
        *LAYOUTS,
        "from the shared tier, GB",
        "ideal",
        "loading pays from 5 blocks on",
        "shared 305",
        "3 nodes of aslru",
    ]
    assert all(word in table.stdout for word in words), table.stdout
    config = tmp_path / "node.yaml"
    config.write_text("warm: {capacity: 60MiB, policy: lru}\ncold: {capacity: 90MiB}\n")
    each = ("--block-tokens", "4", "--nodes", "3", "--config", config, "--bytes-per-token", str(1 << 18))
    table = tierkv_replay(trace_file, *each, "--layout", "private", "--seed", "1")
    assert table.returncode == 0, table.stderr
    words = ["3 nodes of node.yaml, blocks: warm 60, cold 90", "from cold", "best node"]
    assert all(word in table.stdout for word in words), table.stdout
    assert "shared" not in table.stdout
    assert "routed" not in table.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layout", "shared"], ["--nodes"]),
        (["--write", "all"], ["--nodes"]),
        (["--nodes", "2", "--layout", "split"], ["'split'", "private, routed, shared, both"]),
        (["--nodes", "2", "--write", "hits"], ["'hits'", "hits:2"]),
        (["--nodes", "2", "--link", "fast"], ["--link", "10Gbit"]),
        (["--nodes", "2", "--block-bytes", "0"], ["--block-bytes"]),
        (["--nodes", "2", "--shared", "5%", "--shared-blocks", "5"], ["exclude each other"]),
        (["--nodes", "2", "--shared", "5"], ["--shared-blocks"]),
        (["--nodes", "2", "--end-hints"], ["--end-hints"]),
        (["--nodes", "2", "--config", "none.yaml", "--policy", "lru"], ["--config"]),
    ],
)
def test_mistakes_end_with_a_remedy(trace_file: Path, options: list[str], words: list[str]) -> None:
    done = tierkv_replay(trace_file, "--block-tokens", "4", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "remedy:" in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
