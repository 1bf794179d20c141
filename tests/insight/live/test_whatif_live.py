"""Estimates of a cache at work against full replays of the same requests with the same capacities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.insight.live.support import observed
from tests.insight.test_whatif import of_full_blocks
from tests.traces import needs_traces, public
from tierkv.policy import make_policy
from tierkv.replay.single import replay
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Trace


def replayed(trace: Trace, tier: str, capacity: int, warm: int) -> float:
    """Hit rate of a warm tier alone, or of a cold one below it."""
    if tier == "warm":
        return replay(trace, make_policy("slru", capacity), capacity) / trace.prompt_tokens()
    plan = TierPlan((MemoryPlan("warm", warm, "slru"),), capacity, 0.25)
    return sum(map(sum, replay_tiers(trace, plan).tokens)) / trace.prompt_tokens()


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests"), [("weka_claudecode_48s_b512.jsonl.gz", 120), ("mooncake_synthetic_full.jsonl.gz", 150)]
)
def test_a_cache_at_work_knows_what_other_capacities_would_have_found(tmp_path: Any, name: str, requests: int) -> None:
    whole = public(name)
    trace = of_full_blocks(Trace(whole.requests[:requests], whole.block_tokens))
    cold = {"capacity": "6MiB", "segment": "1MiB", "codec": "raw", "sync": "none"}
    with observed({"state_dir": str(tmp_path), "cold": cold}) as seen:
        for request in trace.requests:
            seen.ask(request.blocks)
        report = seen.report()
    rates = report["whatif"]["rates"]
    warm = next(rate["capacity_blocks"] for rate in rates if (rate["tier"], rate["factor"]) == ("warm", 1))
    assert report["dropped"] == 0
    assert [rate["factor"] for rate in rates] == [0.5, 1, 2, 4] * 2
    for rate in rates:
        exact = replayed(trace, rate["tier"], rate["capacity_blocks"], warm)
        assert rate["hit_rate"] == pytest.approx(exact, abs=0.02), rate
    assert len({rate["hit_rate"] for rate in rates}) > 2  # else nothing was asked
