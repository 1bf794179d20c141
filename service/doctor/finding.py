"""One answer of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "exit_code", "fail", "ok", "warn"]

Level = Literal["ok", "warn", "fail"]
_EXIT_CODES: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes
    ----------
    check
        Its name, a short stable word.
    level
        ``fail``: the daemon will not start or will not keep its promises. ``warn``: it will be slower, or something is
        likely to go wrong later.
    message, remedy
        For people; the remedy is empty where nothing needs one.
    """

    check: str
    level: Level
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warn(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warn", message, remedy)


def fail(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "fail", message, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 if there are warnings, 2 if something fails."""
    return max((_EXIT_CODES[finding.level] for finding in findings), default=0)
