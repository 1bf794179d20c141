"""The same things in another order."""

from __future__ import annotations

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.core.batch import Kind

__all__ = ["DOCUMENTS", "KEYS", "REORDERED", "TOOLS"]

TOOLS = Cause(
    code=5,
    name="tool-order",
    title="tools in changing order",
    advice="Send the tools in one fixed order (sort them by name), and the same set in every request.",
    why="The tools come in another order or set, and everything after the first that differs is another prefix.",
    moved=frozenset({Kind.TOOL}),
    reordered=frozenset({Kind.TOOL}),
)

KEYS = Cause(
    code=6,
    name="json-key-order",
    title="JSON keys in changing order",
    advice="Serialise the JSON in {place} with sorted keys (json.dumps(..., sort_keys=True)).",
    why="The same JSON object is written with its keys in another order, and everything after it is another prefix.",
)

DOCUMENTS = Cause(
    code=7,
    name="document-order",
    title="retrieved documents in changing order",
    advice="Sort the documents in {place} by a stable id instead of their score, those most requests share first.",
    why="The same documents come in another order, and everything after the first that differs is another prefix.",
    moved=frozenset({Kind.DOCUMENT}),
    reordered=frozenset({Kind.DOCUMENT}),
)

REORDERED = Cause(
    code=8,
    name="changing-order",
    title="the same parts in changing order",
    advice=(
        "Put the parts of {place} that requests share (tools, documents, examples) into one fixed order; "
        "--tokenizer names them."
    ),
    why="Shared parts come in another order, and everything after the first that differs is another prefix.",
    reordered=frozenset({Kind.OPAQUE}),
)
"""Of token ids only; with text it is known whether these are tools or documents."""
