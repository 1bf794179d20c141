"""Planted causes: found, named, ranked, and charged what they cost; and nothing where there is nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.insight.lint import logs
from tests.insight.lint.oracle import hit_tokens, prompts_of
from tierkv.insight.lint.command import lint_log
from tierkv.insight.lint.options import CacheOptions
from tierkv.insight.lint.readers.log import open_log
from tierkv.insight.lint.report import LintReport, Severity, severity_of

WITHIN = 0.02
TEXT = [name for name in logs.PLANTED if not name.startswith("ids_")]


@dataclass(frozen=True, slots=True)
class Case:
    planted: logs.Planted
    report: LintReport
    hits: int
    costs: dict[str, int]
    twin_rate: float


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build(request.param, tmp_path_factory.getbasetemp())


@cache
def build(name: str, directory: Path) -> Case:
    """Lint a log, with a fix where it has text, and count by the oracle what each of its causes costs."""
    planted = (logs.PLANTED | logs.CLEAN)[name]()
    path = directory / f"{name}.jsonl"
    path.write_text(logs.write(planted.rows))
    fix = None if name.startswith("ids_") else directory / f"{name}-fixed.jsonl"
    with open_log(path) as log:
        report = lint_log(log, fix=fix)
    hits = reached = hit_tokens(prompts_of(planted.rows))
    costs, rate = {}, 0.0
    for cause, rows in planted.stages:
        prompts = prompts_of(rows)
        without = hit_tokens(prompts)
        costs[cause] = without - reached
        reached, rate = without, without / sum(map(len, prompts))
    return Case(planted, report, hits, costs, rate)


@pytest.mark.parametrize("case", [*logs.PLANTED, *logs.CLEAN], indirect=True)
def test_hits_are_those_of_a_slow_cache(case: Case) -> None:
    assert case.report.hit_tokens == case.hits


@pytest.mark.parametrize("case", list(logs.PLANTED), indirect=True)
def test_each_cause_is_charged_what_its_removal_gains(case: Case) -> None:
    found = {finding.cause: finding.lost_tokens for finding in case.report.findings}
    for cause, cost in case.costs.items():
        assert found[cause] == pytest.approx(cost, rel=WITHIN)


@pytest.mark.parametrize("case", list(logs.PLANTED), indirect=True)
def test_nothing_else_is_found_and_the_dearest_comes_first(case: Case) -> None:
    loud = [finding.cause for finding in case.report.findings if finding.severity > Severity.INFO]
    assert sorted(loud) == sorted(case.costs)
    assert loud[0] == max(case.costs, key=lambda cause: case.costs[cause])


@pytest.mark.parametrize("case", list(logs.PLANTED), indirect=True)
def test_severity_is_the_share_of_tokens_lost(case: Case) -> None:
    tokens = case.report.prompt_tokens
    for finding in case.report.findings:
        assert finding.severity is severity_of(finding.lost_tokens / tokens)
    assert case.report.findings[0].severity >= Severity.MEDIUM


@pytest.mark.parametrize("case", list(logs.PLANTED), indirect=True)
def test_lost_tokens_are_counted_once(case: Case) -> None:
    gained = sum(finding.lost_tokens for finding in case.report.findings)
    assert case.report.hit_tokens + gained == case.report.possible_tokens
    assert gained == pytest.approx(sum(case.costs.values()), rel=WITHIN)


@pytest.mark.parametrize("case", TEXT, indirect=True)
def test_the_fixed_log_hits_like_the_one_without_causes(case: Case) -> None:
    assert case.report.fixed is not None
    assert case.report.fixed.hit_rate >= case.twin_rate - 0.01


@pytest.mark.parametrize("case", list(logs.CLEAN), indirect=True)
def test_clean_logs_have_no_finding_above_info(case: Case) -> None:
    assert [finding for finding in case.report.findings if finding.severity > Severity.INFO] == []
    assert case.report.fixed is not None
    assert case.report.fixed.changed == 0


@pytest.mark.parametrize("case", ["timestamp_first"], indirect=True)
def test_an_excerpt_shows_both_prompts_from_where_they_differ(case: Case) -> None:
    quoted = case.report.findings[0].excerpt
    assert quoted is not None
    assert quoted.before.endswith("Current time: 2026-03-01 00:0")
    assert quoted.here[0] != quoted.there[0]
    row = case.planted.rows[quoted.line - 1]["messages"][0]["content"]
    assert row.startswith("Current time: 2026-03-01 00:0" + quoted.here[:20])


@pytest.mark.parametrize(("share", "severity"), [(0.2, "high"), (0.19, "medium"), (0.049, "low"), (0.0099, "info")])
def test_severity_has_fixed_limits(share: float, severity: str) -> None:
    assert severity_of(share).label == severity


def test_a_small_cache_loses_more(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(logs.write(logs.clean_conversations().rows))
    with open_log(path) as log:
        rates = [
            lint_log(log, cache=CacheOptions(capacity_tokens=size)).hit_rate
            for size in (2_000, 8_000, 10_000_000, None)
        ]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] == rates[3]
