"""Conversations that do not only grow."""

from __future__ import annotations

from tierkv.insight.lint.causes.cause import Cause

__all__ = ["HISTORY"]

HISTORY = Cause(
    code=11,
    name="history-rewritten",
    title="earlier turns rewritten or dropped",
    advice="Only append to a conversation: keep earlier messages, reasoning and tool results as they were sent, "
    "or cut many turns at once, seldom.",
    why="A turn changes, strips or drops messages of earlier turns, and everything after the change is another prefix.",
)
