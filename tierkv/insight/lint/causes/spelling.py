"""The same text, written or cut into tokens differently."""

from __future__ import annotations

from tierkv.insight.lint.causes.cause import Cause

__all__ = ["TOKENISER", "WHITESPACE"]

WHITESPACE = Cause(
    code=9,
    name="whitespace",
    title="changed whitespace or line ends",
    advice="Write {place} with the same spaces, blank lines and line ends (LF) in every request.",
    why="The same text comes with other spaces, blank lines or line ends, and everything after it is another prefix.",
)

TOKENISER = Cause(
    code=10,
    name="tokeniser-boundary",
    title="the same text cut into other tokens",
    advice="Tokenise {place} as one whole, or keep the token ids of earlier turns, instead of joining pieces of text.",
    why="The same text is cut into other tokens (tokenised in pieces, or joined), and all after it is another prefix.",
    fixable=False,
)
