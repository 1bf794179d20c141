"""A request as the text an engine would see, part by part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.insight.lint.core.batch import Kind

__all__ = ["SESSION_FIELDS", "SYSTEM_ROLES", "Part", "Prompt", "render", "session_of"]

SYSTEM_ROLES = ("system", "developer")
SESSION_FIELDS = ("session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class Part:
    """Some text of a prompt, all of one origin.

    Attributes
    ----------
    text
        As rendered.
    place
        For readers: `the system prompt`, `the tools`, `later messages (user)` ...
    kind
        `TEXT` if it is to be cut into pieces, else what it is as a whole.
    message
        Index of the message it belongs to, -1 outside of messages (tools, system).
    path
        Where it is in the request, for rewriting: keys and indices.
    """

    text: str
    place: str
    kind: Kind = Kind.TEXT
    message: int = -1
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, rendered.

    Attributes
    ----------
    session
        The conversation's name where the request says it.
    """

    parts: tuple[Part, ...]
    session: str | None = None

    def text(self) -> str:
        """Return all of it."""
        return "".join(part.text for part in self.parts)


def render(request: Mapping[str, Any]) -> Prompt:
    """Render a chat request: tools, then system, then messages, with plain role markers.

    Takes OpenAI's and Anthropic's shapes alike: `tools`, `system` (text or blocks), `messages` with text or a list of
    parts.
    """
    parts = [*_tools(request.get("tools") or request.get("functions") or [], request), *_system(request.get("system"))]
    messages = request.get("messages") or []
    opening = 1 if messages and messages[0].get("role") in SYSTEM_ROLES else 0
    for index, message in enumerate(messages):
        parts.extend(_message(index, message, opening))
    return Prompt(tuple(parts), session_of(request))


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, in either shape."""
    function = tool.get("function")
    inner = function if isinstance(function, Mapping) else tool
    return str(inner.get("name", ""))


def _tools(tools: Sequence[Any], request: Mapping[str, Any]) -> Iterator[Part]:
    field = "tools" if request.get("tools") else "functions"
    if tools:
        yield Part("<|tools|>\n", "the tools", Kind.MARKER)
    for index, tool in enumerate(tools):
        yield Part(json.dumps(tool, ensure_ascii=False) + "\n", "the tools", Kind.TOOL, path=(field, index))


def _system(system: Any) -> Iterator[Part]:
    if system:
        yield Part("<|system|>\n", "the system prompt", Kind.MARKER)
        yield from _content(system, "the system prompt", -1, ("system",))


def _message(index: int, message: Any, opening: int) -> Iterator[Part]:
    role = str(message.get("role", ""))
    first = index < opening
    if first:
        place = "the system prompt"
    else:
        place = f"the first message ({role})" if index == opening else f"later messages ({role})"
    number = -1 if first else index
    yield Part(f"<|{role}|>\n", place, Kind.MARKER, number)
    if message.get("content") is not None:
        yield from _content(message["content"], place, number, ("messages", index, "content"))
    for field in ("reasoning_content", "tool_calls", "function_call"):
        if message.get(field):
            value = message[field]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield Part(f"\n{text}\n", place, Kind.TEXT, number, ("messages", index, field))
    yield Part("\n", place, Kind.MARKER, number)


def _content(content: Any, place: str, message: int, path: tuple[str | int, ...]) -> Iterator[Part]:
    if isinstance(content, str):
        yield Part(content, place, Kind.TEXT, message, path)
        return
    several = len(content) > 2
    for index, block in enumerate(content):
        where = (*path, index)
        kind = block.get("type", "text") if isinstance(block, Mapping) else "text"
        if isinstance(block, str):
            yield Part(block, place, Kind.TEXT, message, where)
        elif kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
            yield Part(block["text"], place, Kind.DOCUMENT if several else Kind.TEXT, message, (*where, "text"))
        elif kind in ("document", "search_result"):
            yield Part(json.dumps(block, ensure_ascii=False) + "\n", place, Kind.DOCUMENT, message, where)
        elif kind == "tool_result" and isinstance(block.get("content"), str):
            yield Part(block["content"], place, Kind.TEXT, message, (*where, "content"))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            yield Part(block["thinking"], place, Kind.TEXT, message, (*where, "thinking"))
        else:
            yield Part(json.dumps(block, ensure_ascii=False), place, Kind.JSON, message, where)


def session_of(request: Mapping[str, Any]) -> str | None:
    """Return the conversation's name where a request says it."""
    metadata = request.get("metadata")
    for source in (request, metadata if isinstance(metadata, Mapping) else {}):
        for field in SESSION_FIELDS:
            if isinstance(source.get(field), str | int):
                return str(source[field])
    return None
