"""The demo's verdict: it fails when a token differs or another tenant reuses anything, and its totals add up."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tierkv.errors import StorageError
from tierkv.insight.usage import Usage
from tierkv.service.demo.report import Report, RequestReport, print_report, write_json

pytest.importorskip("transformers")
adapter = pytest.importorskip("tierkv.engines.transformers")

STATS = {
    "tiers": {
        "warm": {"used_bytes": 3 << 20, "payload_bytes": 2 << 20},
        "cold": {"used_bytes": 9 << 20, "payload_bytes": 6 << 20, "stored_bytes": 4 << 20},
    },
    "counters": {"hidden_seconds": 0.75, "exposed_seconds": 0.25},
}


def generation(reused: dict[str, int], ttft_s: float, **changes: Any) -> Any:
    total = sum(reused.values())
    made = adapter.Generation(
        tokens=(5, 6),
        prompt_tokens=1000,
        reused_tokens=total,
        prefilled_tokens=1000 - total,
        tokens_by_tier=reused,
        stored_blocks=0,
        ttft_s=ttft_s,
        wait_s=0.0,
        load_s=0.0,
        total_s=2 * ttft_s,
        errors=(),
        usage=Usage(1000, 2, total),
    )
    return replace(made, **changes)


@pytest.fixture
def report() -> Report:
    first = RequestReport(
        "ada-1", "ada", generation({}, 4.0), generation({}, 4.1), generation({"hot": 960}, 0.5), generation({}, 1.0)
    )
    second = RequestReport(
        "bob-1",
        "bob",
        generation({}, 4.0),
        generation({"hot": 512, "warm": 128}, 1.0),
        generation({"warm": 960}, 1.0),
        generation({"cold": 960}, 1.0),
    )
    return Report([first, second], generation({}, 4.0), True, [STATS, STATS])


def printed(report: Report) -> str:
    text = StringIO()
    print_report(report, Console(width=80, file=text))
    return text.getvalue()


def test_a_good_run_succeeds_and_its_totals_add_up(report: Report, tmp_path: Path) -> None:
    assert report.exit_code == 0
    write_json(report, tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["positions_without_cache"] == 2000
    assert found["positions_prefilled"] == 1000 + 360
    assert found["hit_rate"] == pytest.approx(0.32)
    assert found["speedup_warm"] == pytest.approx(6.0)
    assert found["compression_ratio"] == pytest.approx(1.5)
    assert found["bytes_by_tier"] == {"warm": 3 << 20, "cold": 4 << 20}
    assert (found["prefetch_hidden_s"], found["prefetch_exposed_s"]) == (1.5, 0.5)
    assert found["other_tenant_reused_tokens"] == 0
    assert found["requests"][1] == {
        "id": "bob-1",
        "user": "bob",
        "prompt_tokens": 1000,
        "reused_tokens": 640,
        "reused_by_tier": {"hot": 512, "warm": 128},
        "reused_tokens_warm": 960,
        "reused_by_tier_warm": {"warm": 960},
        "reused_tokens_restart": 960,
        "reused_by_tier_restart": {"cold": 960},
        "ttft_uncached_s": 4.0,
        "ttft_cold_s": 1.0,
        "ttft_warm_s": 1.0,
        "ttft_restart_s": 1.0,
        "tokens_identical": True,
    }
    text = printed(report)
    assert "1,360 of 2,000" in text
    assert "0 / 960 / 0" in text
    assert "512 / 128 / 0" in text
    assert "0 / 0 / 960" in text
    assert "NO" not in text
    assert "…" not in text


@pytest.mark.parametrize("phase", ["cold", "warm", "restart"])
def test_another_token_in_any_phase_is_a_failure(report: Report, phase: str) -> None:
    bad = replace(report.requests[1], **{phase: replace(getattr(report.requests[1], phase), tokens=(5, 7))})
    failed = replace(report, requests=[report.requests[0], bad])
    assert failed.exit_code == 1
    assert "NO" in printed(failed)


def test_a_hit_or_another_answer_for_the_other_tenant_is_a_failure(report: Report) -> None:
    assert replace(report, other=generation({"warm": 64}, 4.0)).exit_code == 1
    assert replace(report, other_identical=False).exit_code == 1


def test_failures_of_the_cache_are_shown(report: Report) -> None:
    failing = replace(report, other=replace(report.other, errors=("unavailable", "unavailable")))
    assert failing.to_dict()["cache_errors"] == {"unavailable": 2}
    assert "unavailable" in printed(failing)


def test_a_daemon_that_reports_less_leaves_gaps_not_errors(report: Report) -> None:
    bare = replace(report, stats=[{}, {}])
    assert bare.to_dict()["compression_ratio"] is None
    assert bare.to_dict()["bytes_by_tier"] == {}
    printed(bare)


def test_an_unwritable_place_is_named(report: Report, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        write_json(report, tmp_path / "nowhere" / "report.json")
