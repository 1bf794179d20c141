"""Where two prompts part, in a few words of both."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

import numpy as np

from tierkv.insight.lint.sources.source import Shown

__all__ = ["Excerpt", "excerpt", "template_label"]

_BEFORE, _AFTER = 48, 64
_TOKENS_SHOWN = 8
_LABEL = 60


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Two prompts where they differ.

    Attributes
    ----------
    token
        Number of the first token that differs, in the prompt of `line`.
    line, other_line
        Where the log has the prompt and the earlier one it is compared with.
    before
        Text both have in front of the difference; empty if text is not shown.
    here, there
        How the prompt and the earlier one go on.
    """

    token: int
    line: int
    other_line: int
    before: str = ""
    here: str = ""
    there: str = ""


def excerpt(prompt: Shown, other: Shown, offset: int, with_text: bool, tokens_differ: bool = False) -> Excerpt:
    """Quote two prompts where they first differ at or behind token `offset` of the first.

    With `tokens_differ` the text does not differ there, only its tokens: these are quoted.
    """
    if prompt.text is None or other.text is None:
        at = max(_common_tokens(prompt, other), offset) if offset < prompt.tokens.size else 0
        if not with_text:
            return Excerpt(at, prompt.line, other.line)
        before = _ids(prompt, slice(max(0, at - 4), at))
        return Excerpt(
            at,
            prompt.line,
            other.line,
            before and f"{before} ",
            *(_ids(p, slice(at, at + _TOKENS_SHOWN)) for p in (prompt, other)),
        )
    here, there, token = _aligned(prompt, other, offset)
    if tokens_differ and with_text:
        at = _common_tokens(prompt, other)
        ids = [_ids(p, slice(at, at + _TOKENS_SHOWN)) for p in (prompt, other)]
        return Excerpt(at, prompt.line, other.line, prompt.text[max(0, here - _BEFORE) : here], *ids)
    # The pieces that differ may begin alike.
    pairs = zip(prompt.text[here:], other.text[there:], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not with_text:
        return Excerpt(token, prompt.line, other.line)
    here, there = here + same, there + same
    return Excerpt(
        token,
        prompt.line,
        other.line,
        prompt.text[max(0, here - _BEFORE) : here],
        prompt.text[here : here + _AFTER],
        other.text[there : there + _AFTER],
    )


def template_label(prompt: Shown, template: int) -> str:
    """Return the start of the text that names a template."""
    for meaning, text, _ in prompt.pieces:
        if meaning == template:
            return " ".join(text.split())[:_LABEL]
    return ""


def _aligned(prompt: Shown, other: Shown, offset: int) -> tuple[int, int, int]:
    """Return where both go on from the piece at `offset`: characters of each, and the token."""
    ours, theirs = [piece[0] for piece in prompt.pieces], [piece[0] for piece in other.pieces]
    ends = np.cumsum([piece[2] for piece in prompt.pieces])
    wanted = min(int(np.searchsorted(ends, offset, side="right")), max(len(ours) - 1, 0))
    token = int(ends[wanted - 1]) if wanted else 0
    # Where the prompts part at this very piece, or just behind it, they are the same up to there.
    if ours[:wanted] == theirs[:wanted]:
        return _characters(prompt, wanted), _characters(other, wanted), token
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for tag, first, last, their_first, _ in matcher.get_opcodes():
        if wanted < last:
            their = their_first + (wanted - first if tag == "equal" else 0)
            return _characters(prompt, wanted), _characters(other, their), token
    return _characters(prompt, wanted), _characters(other, len(theirs)), token


def _characters(prompt: Shown, pieces: int) -> int:
    return sum(len(text) for _, text, _ in prompt.pieces[:pieces])


def _common_tokens(prompt: Shown, other: Shown) -> int:
    size = min(prompt.tokens.size, other.tokens.size)
    differing = np.flatnonzero(prompt.tokens[:size] != other.tokens[:size])
    return int(differing[0]) if differing.size else size


def _ids(prompt: Shown, window: slice) -> str:
    return " ".join(map(str, prompt.tokens[window].tolist()))
