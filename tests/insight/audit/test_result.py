"""Results of audits as data: there and back again, nothing else accepted, and the score of many."""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import InvalidRequest
from tierkv.insight.audit import AuditLog, AuditResult, Finding, LogitsDifference, PlaneDifference

amounts = st.floats(min_value=0, allow_nan=False) | st.just(math.inf)
counts = st.integers(0, 1 << 40)
PLANES = st.builds(
    PlaneDifference,
    layer=counts,
    differing=counts,
    max_difference=amounts,
    relative_error=amounts,
    limit=amounts,
    ulps=st.lists(counts, max_size=4).map(tuple),
)
LOGITS = st.builds(
    LogitsDifference, max_difference=amounts, limit=amounts, kl=st.none() | amounts, kl_limit=st.none() | amounts
)
FINDINGS = st.builds(
    Finding, block=counts, layer=counts, token=counts, difference=amounts, limit=amounts, positions=counts
)
RESULTS = st.builds(
    AuditResult,
    tokens=counts,
    block_tokens=counts,
    planes=st.lists(PLANES, max_size=3).map(tuple),
    logits=st.none() | LOGITS,
    finding=st.none() | FINDINGS,
    answer_token=st.none() | counts,
    computed=counts,
    seconds=amounts,
    at=amounts,
)
OK = AuditResult(
    engine="transformers",
    namespace="ab" * 32,
    verdict="ok",
    basis="envelope",
    reason="",
    dtype="bfloat16",
    lossy="",
    tokens=32,
    block_tokens=16,
    planes=(PlaneDifference(0, "K", 3, 0.5, 0.01, 1.0, (5, 2, 1)),),
    logits=LogitsDifference(0.25, 1.0, 0.002, None, same_token=True, near_tie=True),
    finding=None,
    answer_token=None,
    computed=2,
    seconds=0.5,
    at=1.0,
)
BAD = replace(OK, verdict="corrupt", reason="difference", finding=Finding(1, "cd" * 32, 4, "V", 17, math.inf, 1.0, 1))


@settings(max_examples=50)
@given(RESULTS)
def test_a_result_survives_json(result: AuditResult) -> None:
    assert AuditResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fine"},
        {"reason": "because"},
        {"tokens": -1},
        {"tokens": "many"},
        {"seconds": math.nan},
        {"more": 1},
        {"planes": [{"layer": 0}]},
        {"finding": {**BAD.to_dict()["finding"], "plane": "Q"}},
        {"logits": []},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="result of an audit"):
        AuditResult.from_dict({**OK.to_dict(), **change})


@pytest.mark.parametrize("name", OK.to_dict())
def test_nothing_may_be_absent(name: str) -> None:
    data = OK.to_dict()
    del data[name]
    with pytest.raises(InvalidRequest, match=name):
        AuditResult.from_dict(data)


def test_a_log_counts_and_keeps_the_worst(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog()
    with caplog.at_level(logging.INFO):
        log.add(OK)
        assert not caplog.records
        assert log.clean
        log.add(BAD)
    log.skip("busy")
    assert not log.clean
    assert log.last == (BAD,)
    kept = json.loads(json.dumps(log.to_dict(), allow_nan=False))
    assert kept["audits"] == {"ok": 1, "outside": 0, "corrupt": 1}
    assert kept["skipped"] == {"busy": 1}
    assert (kept["tokens"], kept["seconds"], kept["mean_kl"]) == (64, 1.0, 0.002)
    assert kept["worst"] == {
        "difference": 0.5,
        "relative_error": 0.01,
        "of_limit": 0.5,
        "ulps_log2": 2,
        "logits": 0.25,
        "kl": 0.002,
    }
    assert AuditResult.from_dict(kept["last"][0]) == BAD


def test_the_alarm_says_where_and_nothing_that_identifies_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    AuditLog().add(BAD)
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    said = {name: vars(line)[name] for name in ("verdict", "reason", "block", "layer", "plane", "position")}
    assert said == {"verdict": "corrupt", "reason": "difference", "block": 1, "layer": 4, "plane": "V", "position": 17}
    assert not any("cdcd" in str(value) or "abab" in str(value) for value in vars(line).values())
    AuditLog(alarm=False).add(BAD)
    assert len(caplog.records) == 1


def test_a_log_keeps_the_last_findings_only() -> None:
    log = AuditLog(alarm=False)
    for at in range(40):
        log.add(replace(BAD, at=float(at)))
        log.add(OK)
    assert [result.at for result in log.last] == [float(at) for at in range(24, 40)]


def test_many_threads_may_add() -> None:
    log = AuditLog(alarm=False)
    threads = [threading.Thread(target=lambda: [log.add(BAD) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.verdicts["corrupt"] == 800
