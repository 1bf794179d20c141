"""Dates and times."""

from __future__ import annotations

import re

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.core.batch import Kind

__all__ = ["CLOCK"]

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,?\s+"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm]\b)?(?:\s?(?:Z\b|UTC\b|GMT\b|[+-]\d{2}:?\d{2}\b))?"
_DATE = "|".join(
    (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{4}",
        rf"{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}",
        rf"\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH},?\s+\d{{4}}",
    )
)
_PATTERN = re.compile(
    rf"\b(?:{_DAY})?(?:{_DATE})(?:(?:T|,?\s+(?:at\s+)?){_TIME})?|\b{_TIME}|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?\b"
)

CLOCK = Cause(
    code=1,
    name="date-or-time",
    title="date or time",
    advice="Move the date or time out of {place} to the end of the last message, or round it to what the task needs.",
    why="A date or time changes from request to request, and everything after it is another prefix.",
    moved=frozenset({Kind.CLOCK}),
    literals={Kind.CLOCK: _PATTERN},
)
