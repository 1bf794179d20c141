"""Putting new texts back into a request."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.readers.entry import Entry
from tierkv.insight.lint.readers.parse import unwrapped
from tierkv.insight.lint.text.prompt import Prompt

__all__ = ["rewritten_line"]

_PROMPT_FIELDS = ("prompt", "text", "input")
_READ_ONLY = ("tool_calls", "function_call", "reasoning_content")


def rewritten_line(entry: Entry, prompt: Prompt, texts: Mapping[int, str]) -> tuple[str, bool]:
    """Return the request as a line of JSON with the new texts of its parts, and whether any differs."""
    changes = {
        index: text
        for index, text in texts.items()
        if text != prompt.parts[index].text
        and prompt.parts[index].kind is not Kind.MARKER
        and prompt.parts[index].path[-1:] not in [(field,) for field in _READ_ONLY]
    }
    if isinstance(entry.body, str):
        return json.dumps(_text_line(entry, changes.get(0, entry.body)), ensure_ascii=False), bool(changes)
    line: Any = copy.deepcopy(entry.original or entry.body)
    body = unwrapped(line)
    for index, text in changes.items():
        part = prompt.parts[index]
        value = text if part.kind is Kind.TEXT or part.path[-1] == "text" else json.loads(text)
        _put(body, part.path, value)
    return json.dumps(line, ensure_ascii=False), bool(changes)


def _text_line(entry: Entry, text: str) -> Any:
    if not isinstance(entry.original, dict):
        return text
    line = copy.deepcopy(entry.original)
    body = unwrapped(line)
    body[next(field for field in _PROMPT_FIELDS if isinstance(body.get(field), str))] = text
    return line


def _put(body: Any, path: tuple[str | int, ...], value: Any) -> None:
    for step in path[:-1]:
        body = body[step]
    body[path[-1]] = value
