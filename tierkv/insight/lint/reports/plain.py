"""A report as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tierkv.insight.lint.report import Finding, LintReport

__all__ = ["json_text"]


def json_text(report: LintReport) -> str:
    """Return the report as JSON. Counts are in tokens, rates and shares from 0 to 1."""
    figures: dict[str, Any] = asdict(report)
    figures["hit_rate"], figures["possible_rate"] = report.hit_rate, report.possible_rate
    figures["findings"] = [_finding(finding) for finding in report.findings]
    if report.fixed is not None:
        figures["fixed"] |= {"hit_rate": report.fixed.hit_rate}
    return json.dumps(figures, indent=2, ensure_ascii=False)


def _finding(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"severity": finding.severity.label}
