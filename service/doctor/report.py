"""The doctor's findings for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from tierkv.service.doctor.finding import Finding, Level

__all__ = ["print_findings"]

_STYLES: dict[Level, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print a line for each finding, and its remedy below it."""
    for finding in findings:
        level = Text(f"{finding.level:<5}", _STYLES[finding.level])
        console.print(level.append(f"{finding.check}: {finding.message}", "default not bold"), soft_wrap=True)
        if finding.remedy:
            console.print(f"      {finding.remedy}", markup=False, highlight=False, soft_wrap=True)
