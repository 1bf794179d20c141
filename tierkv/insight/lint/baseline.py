"""Findings that are known and accepted, so that only new ones fail a build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.insight.lint.report import Finding

__all__ = ["mark_known", "read_baseline"]

_GROWTH, _SLACK = 1.25, 0.01
"""A known finding may grow by a quarter and a hundredth of the prompt tokens before it is new again: logs differ."""


def read_baseline(path: Path) -> dict[str, float]:
    """Read an earlier `--json` output: fingerprint -> share of the prompt tokens. Raises `ConfigError`."""
    try:
        findings = json.loads(path.read_text())["findings"]
        return {str(finding["fingerprint"]): float(finding["share"]) for finding in findings}
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="name an output of tierkv lint --json"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no baseline", remedy="name an output of tierkv lint --json") from None


def mark_known(findings: Sequence[Finding], baseline: dict[str, float]) -> tuple[Finding, ...]:
    """Mark the findings that the baseline has, if they have not grown."""
    return tuple(
        replace(f, known=f.share <= baseline.get(f.fingerprint, -1.0) * _GROWTH + _SLACK)
        if f.fingerprint in baseline
        else f
        for f in findings
    )
