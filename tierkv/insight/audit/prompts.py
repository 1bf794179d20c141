"""Prompts to audit with, from a file."""

from __future__ import annotations

import json
from pathlib import Path

from tierkv.errors import InvalidRequest, StorageError

__all__ = ["Prompt", "read_prompts"]

Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts, one JSON object a line: ``{"prompt": "text"}`` or ``{"tokens": [1, 2, 3]}``.

    Raises
    ------
    StorageError
        The file cannot be read.
    InvalidRequest
        A line is neither; the message names it. Or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}", remedy="name a file of prompts") from error
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InvalidRequest(f"{path} holds no prompts", remedy='write lines such as {"prompt": "..."}')
    return found


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        text, tokens = row.get("prompt"), row.get("tokens")
        if isinstance(text, str) and text:
            return text
        if isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens):
            return tuple(tokens)
    raise InvalidRequest(
        f"{path}, line {number} is no prompt", remedy='write {"prompt": "text"} or {"tokens": [1, 2, 3]}'
    )
