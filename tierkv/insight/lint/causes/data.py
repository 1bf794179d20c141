"""What belongs to one user or one request, in front of what all share."""

from __future__ import annotations

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.core.batch import Kind

__all__ = ["CHANGING_VALUE", "USER_DATA"]

USER_DATA = Cause(
    code=3,
    name="user-data-first",
    title="user data before shared text",
    advice="Move what differs between requests in {place} behind what all share: instructions, tools, examples.",
    why="Text of one user or request stands in front of text that many requests share, which then cannot be shared.",
    moved=frozenset({Kind.TEXT, Kind.JSON, Kind.OPAQUE}),
)

CHANGING_VALUE = Cause(
    code=4,
    name="changing-value",
    title="short value that changes (date, id or counter)",
    advice=(
        "Find the value that changes in {place} (a date, an id, a counter) and move it to the end of the prompt; "
        "--tokenizer names it."
    ),
    why="A few tokens change from request to request, and everything after them is another prefix.",
)
"""Of token ids only: a run of changing tokens too short to be a user's data. The text would say what it is."""
