"""The table of causes: one file per family, one row per cause."""

from __future__ import annotations

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.causes.clock import CLOCK
from tierkv.insight.lint.causes.data import CHANGING_VALUE, USER_DATA
from tierkv.insight.lint.causes.history import HISTORY
from tierkv.insight.lint.causes.identifiers import IDENTIFIER
from tierkv.insight.lint.causes.order import DOCUMENTS, KEYS, REORDERED, TOOLS
from tierkv.insight.lint.causes.spelling import TOKENISER, WHITESPACE

__all__ = ["BY_CODE", "BY_NAME", "CAUSES", "UNEXPLAINED", "Cause"]

UNEXPLAINED = Cause(
    code=0,
    name="unexplained",
    title="no cause found",
    advice="Compare the two prompts where they differ.",
    why="Hits were lost behind a difference that none of the known causes explains.",
    fixable=False,
)

CAUSES: tuple[Cause, ...] = (
    *(CLOCK, IDENTIFIER, USER_DATA, CHANGING_VALUE, TOOLS, KEYS, DOCUMENTS, REORDERED, WHITESPACE, TOKENISER, HISTORY),
)
BY_CODE = {cause.code: cause for cause in (UNEXPLAINED, *CAUSES)}
BY_NAME = {cause.name: cause for cause in (UNEXPLAINED, *CAUSES)}
