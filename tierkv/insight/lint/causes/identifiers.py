"""UUIDs, request and session ids, counters."""

from __future__ import annotations

import re

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.core.batch import Kind

__all__ = ["IDENTIFIER"]

_UUID = r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
_HEX = r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{10,64}\b"
_TAGGED = r"\b[A-Za-z]{2,12}[-_](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{6,40}\b"
_RANDOM = r"\b(?=[A-Za-z0-9_]*\d)(?=[A-Za-z0-9_]*[a-z])(?=[A-Za-z0-9_]*[A-Z])[A-Za-z0-9_]{16,64}\b"
_COUNTED = (
    r"(?:\b(?:request|session|conversation|turn|trace|ticket|order|run|job|step|call|seq|sequence|nonce|attempt|counter|count"
    r"|user|customer|id|no\.)\b|#)"
)

IDENTIFIER = Cause(
    code=2,
    name="id-or-counter",
    title="request id, session id or counter",
    advice="Move the id or counter out of {place} to the end of the last message, or drop it.",
    why="An id or counter is new in every request or session, and everything after it is another prefix.",
    moved=frozenset({Kind.IDENTIFIER, Kind.COUNTER}),
    literals={
        Kind.IDENTIFIER: re.compile("|".join((_UUID, _HEX, _TAGGED, _RANDOM))),
        Kind.COUNTER: re.compile(
            rf"(?i:(?<=#)|{_COUNTED}[^\S\n]*(?:id|no\.?|number)?[^\S\n]*[:=#]?[^\S\n]*#?)(?P<value>\d{{1,18}})\b"
        ),
    },
)
