"""Conversations that are rewritten: what the turns still share, and what they no longer do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.insight.lint import logs
from tests.insight.lint.logs import words
from tierkv.insight.lint.command import lint_log
from tierkv.insight.lint.readers.log import open_log
from tierkv.insight.lint.report import LintReport

TURNS = 8


def conversations(rewrite: Any, named: bool) -> list[dict[str, Any]]:
    rng = random.Random(40)
    system = {"role": "system", "content": words(rng, 120)}
    rows = []
    for number in range(12):
        messages: list[dict[str, str]] = [{"role": "user", "content": words(rng, 40)}]
        for _ in range(TURNS):
            row: dict[str, Any] = {"messages": [system, *rewrite(messages)]}
            rows.append(row | {"session_id": f"s{number}"} if named else row)
            thought = f"<think>{words(rng, 30)}</think>\n{words(rng, 50)}"
            messages = [
                *messages,
                {"role": "assistant", "content": thought},
                {"role": "user", "content": words(rng, 30)},
            ]
    return rows


def stripped(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Reasoning is dropped from all answers but the last."""
    last = len(messages) - 2
    return [
        m | {"content": m["content"].split("</think>\n")[-1]} if m["role"] == "assistant" and n < last else m
        for n, m in enumerate(messages)
    ]


def window(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return messages[-5:]


def lint(tmp_path: Path, rows: list[dict[str, Any]], fix: bool = False) -> LintReport:
    (tmp_path / "log.jsonl").write_text(logs.write(rows))
    with open_log(tmp_path / "log.jsonl") as log:
        return lint_log(log, fix=tmp_path / "fixed.jsonl" if fix else None)


@pytest.mark.parametrize("named", [True, False])
def test_stripped_reasoning_is_found_and_put_back(tmp_path: Path, named: bool) -> None:
    whole = lint(tmp_path, conversations(list, named))
    report = lint(tmp_path, conversations(stripped, named), fix=True)
    assert report.findings[0].cause == "history-rewritten"
    assert report.fixed is not None
    assert report.fixed.hit_rate == pytest.approx(whole.hit_rate, abs=0.01)
    assert whole.findings == ()


def test_a_sliding_window_is_found_in_named_sessions(tmp_path: Path) -> None:
    report = lint(tmp_path, conversations(window, named=True))
    (finding,) = report.findings
    assert finding.cause == "history-rewritten"
    # Each turn from the third on keeps four messages of the one before it, of which it finds none.
    assert finding.requests == 12 * (TURNS - 3)
