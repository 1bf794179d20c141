"""A report as SARIF 2.1.0, for code scanning. https://docs.oasis-open.org/sarif/sarif/v2.1.0/"""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from tierkv import __version__
from tierkv.insight.lint.causes import CAUSES, Cause
from tierkv.insight.lint.report import Finding, LintReport, Severity
from tierkv.insight.lint.reports.words import cost_words, excerpt_place, visible

__all__ = ["sarif_text"]

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.HIGH: "error", Severity.MEDIUM: "warning", Severity.LOW: "note", Severity.INFO: "none"}


def sarif_text(report: LintReport) -> str:
    """Return the report as SARIF: one rule per cause, one result per finding, at the line of the log that shows it."""
    driver = {
        "name": "tierkv lint",
        "version": __version__,
        "rules": [_rule(cause) for cause in CAUSES],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, report) for finding in report.findings],
        "properties": {
            "requests": report.requests,
            "promptTokens": report.prompt_tokens,
            "hitRate": report.hit_rate,
            "possibleRate": report.possible_rate,
            "tokeniser": report.tokeniser,
        },
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _rule(cause: Cause) -> dict[str, Any]:
    return {
        "id": cause.name,
        "name": "".join(word.capitalize() for word in cause.name.split("-")),
        "shortDescription": {"text": cause.title},
        "fullDescription": {"text": cause.why},
        "help": {"text": cause.advice.format(place="the prompt")},
    }


def _result(finding: Finding, report: LintReport) -> dict[str, Any]:
    level = _LEVELS[finding.severity]
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(report.log)}}
    message = f"{finding.title} in {finding.place}: {cost_words(finding)}. {finding.advice}"
    if finding.excerpt is not None:
        message += f" See {excerpt_place(finding, report)}."
        # Rows of arrays are counted from 0, lines from 1.
        location["region"] = {"startLine": max(finding.excerpt.line, 1)}
        if finding.excerpt.here:
            location["region"]["snippet"] = {"text": visible(finding.excerpt.before + finding.excerpt.here)}
    return {
        "ruleId": finding.cause,
        "ruleIndex": next(index for index, cause in enumerate(CAUSES) if cause.name == finding.cause),
        "kind": "informational" if level == "none" else "fail",
        "level": level,
        "message": {"text": message},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"causeAndPlace/v1": finding.fingerprint},
        "baselineState": "unchanged" if finding.known else "new",
        "properties": {"lostTokens": finding.lost_tokens, "share": finding.share, "severity": finding.severity.label},
    }


def _uri(log: str) -> str:
    if log == "<stdin>":
        return "stdin"
    path = PurePath(log)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
