"""From a line to requests; and which format a line is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from tierkv.errors import InvalidRequest
from tierkv.insight.lint.core.batch import Tokens
from tierkv.insight.lint.readers.entry import Entry, Format

__all__ = ["MOONCAKE_BLOCK", "detect", "from_value", "parse", "unwrapped"]

MOONCAKE_BLOCK = 512
"""Tokens that one `hash_ids` of a Mooncake trace stands for."""
_TOKEN_FIELDS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def detect(line: str) -> Format:
    """Tell the format from a log's first line that is not blank."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Format.TEXT
    if isinstance(value, list):
        return Format.TOKENS if all(_is_token(item) for item in value) else Format.TEXT
    if not isinstance(value, dict):
        return Format.TEXT
    body = unwrapped(value)
    if "conversations" in body:
        return Format.SHAREGPT
    if "messages" in body:
        return Format.ANTHROPIC if "system" in body else Format.OPENAI
    if "hash_ids" in body:
        return Format.MOONCAKE
    if any(field in body for field in _TOKEN_FIELDS) or isinstance(body.get("prompt"), list):
        return Format.TOKENS
    return Format.TEXT


def parse(text: str, kind: Format, number: int, name: str) -> Iterator[Entry]:
    """Yield the requests of one line: several for a ShareGPT conversation, one for each answer in it.

    Raises `InvalidRequest` naming file and line.
    """
    where = f"{name}:{number}"
    if kind is Format.TEXT:
        yield _prompt(text, number, where)
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"not JSON: {error}", kind)
    yield from from_value(value, kind, number, where)


def from_value(value: Any, kind: Format, number: int, where: str) -> Iterator[Entry]:
    """Yield the requests of one parsed line."""
    body = unwrapped(value) if isinstance(value, dict) else value
    if kind in (Format.OPENAI, Format.ANTHROPIC):
        yield Entry(number, _chat(body, where, kind), value)
    elif kind is Format.SHAREGPT:
        yield from _conversation(body, number, where)
    elif kind is Format.TOKENS:
        yield Entry(number, _tokens(body, where), value)
    else:
        yield Entry(number, _mooncake(body, where), value)


def _prompt(text: str, number: int, where: str) -> Entry:
    """A line is a JSON string, an object with a `prompt`, or simply the prompt."""
    stripped = text.strip()
    if stripped[:1] in ('"', "{"):
        try:
            value = json.loads(stripped)
        except (ValueError, RecursionError) as error:
            if stripped[0] == '"':
                _refuse(where, f"not a JSON string: {error}", Format.TEXT)
            return Entry(number, text, text)
        if isinstance(value, str):
            return Entry(number, value, value)
        body = unwrapped(value)
        for field in ("prompt", "text", "input"):
            if isinstance(body.get(field), str):
                return Entry(number, body[field], value)
        _refuse(where, "an object without 'prompt', 'text' or 'messages'", Format.TEXT)
    return Entry(number, text, text)


def unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    """Take the request out of a batch file's or a gateway's envelope."""
    for field in ("body", "request", "payload"):
        if isinstance(value.get(field), dict):
            inner: dict[str, Any] = value[field]
            return inner
    return value


def _chat(body: Any, where: str, kind: Format) -> dict[str, Any]:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        _refuse(where, "no list 'messages'", kind)
    for index, message in enumerate(body["messages"]):
        content = message.get("content") if isinstance(message, dict) else 0
        if content is not None and not isinstance(content, str | list):
            _refuse(where, f"messages[{index}] is not an object with a text or a list as its content", kind)
        if isinstance(content, list) and not all(isinstance(block, dict | str) for block in content):
            _refuse(where, f"messages[{index}] has a content block that is neither an object nor text", kind)
    tools, system = body.get("tools") or [], body.get("system")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _refuse(where, "'tools' is not a list of objects", kind)
    texts = system if isinstance(system, list) else [system or ""]
    if not all(isinstance(text, dict | str) for text in texts):
        _refuse(where, "'system' is neither text nor a list of blocks", kind)
    return body


def _conversation(body: Any, number: int, where: str) -> Iterator[Entry]:
    turns = body.get("conversations") if isinstance(body, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        _refuse(where, "no list 'conversations'", Format.SHAREGPT)
    messages: list[dict[str, str]] = []
    session = str(body.get("id", number))
    for turn in turns:
        role, text = _ROLES.get(str(turn.get("from", turn.get("role", "")))), turn.get("value", turn.get("content"))
        if role is None or not isinstance(text, str):
            _refuse(where, "a turn without 'from' (human, gpt, system, tool) and 'value'", Format.SHAREGPT)
        if role == "assistant" and messages:
            yield Entry(number, {"messages": list(messages), "session_id": session})
        messages.append({"role": role, "content": text})
    if messages and messages[-1]["role"] != "assistant":
        yield Entry(number, {"messages": messages, "session_id": session})


def _tokens(body: Any, where: str) -> Tokens:
    if isinstance(body, dict):
        body = next((body[field] for field in (*_TOKEN_FIELDS, "prompt") if field in body), None)
    if not isinstance(body, list) or not all(map(_is_token, body)):
        _refuse(where, "not a list of token ids", Format.TOKENS)
    return np.asarray(body, np.uint32)


def _mooncake(body: Any, where: str) -> Tokens:
    ids = body.get("hash_ids") if isinstance(body, dict) else None
    length = body.get("input_length") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not all(map(_is_token, ids)) or not isinstance(length, int) or length < 0:
        _refuse(where, "no 'hash_ids' and 'input_length'", Format.MOONCAKE)
    if len(ids) != -(-length // MOONCAKE_BLOCK):
        _refuse(where, f"{length} tokens do not make {len(ids)} blocks of {MOONCAKE_BLOCK}", Format.MOONCAKE)
    blocks = np.asarray(ids, np.uint64)[:, None] * np.uint64(MOONCAKE_BLOCK) + np.arange(
        MOONCAKE_BLOCK, dtype=np.uint64
    )
    return blocks.reshape(-1)[:length].astype(np.uint32)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _refuse(where: str, what: str, kind: Format) -> NoReturn:
    raise InvalidRequest(
        f"{where}: {what}",
        remedy=f"correct the line, leave such lines out with --skip-bad, or, if it is not {kind}, say --format",
    )
