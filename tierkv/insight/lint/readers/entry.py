"""What readers yield: one request of a log, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierkv.insight.lint.core.batch import Tokens

__all__ = ["Entry", "Format"]


class Format(StrEnum):
    """Formats of logs."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    SHAREGPT = "sharegpt"
    TEXT = "text"
    TOKENS = "tokens"
    MOONCAKE = "mooncake"
    NUMPY = "numpy"


@dataclass(frozen=True, slots=True)
class Entry:
    """One request.

    Attributes
    ----------
    line
        Where it stands: a line of the file (from 1), a row of an array (from 0), a conversation of a JSON list (from
        1).
    body
        The chat request, the prompt's text, or its token ids.
    original
        The line as parsed, around `body`: what a rewritten log keeps.
    """

    line: int
    body: dict[str, Any] | str | Tokens
    original: Any = None
