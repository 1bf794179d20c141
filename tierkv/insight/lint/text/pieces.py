"""Cutting a part's text into pieces: documents, JSON, lines and sentences, and the values that change within these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from tierkv.insight.lint.causes import CAUSES
from tierkv.insight.lint.core.batch import Kind

__all__ = ["Piece", "canonical_json", "cut"]

_TAGGED = re.compile(r"<(document|doc|source|passage|chunk|result)\b[^>\n]*>.*?</\1>\s*", re.DOTALL)
_HEADED = re.compile(
    r"^(?:\[\d{1,3}\]|#{0,4} ?(?:Document|Doc|Source|Passage|Result|Chunk|Snippet) ?#?\d{1,3}\b[:.)\]]?)", re.MULTILINE
)
_LAST_DOCUMENT = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)
_ANYTHING = re.compile(r".+", re.DOTALL)
_ORDINAL = re.compile(r"(?:(?<=^\[)|(?<=index=\")|(?<=number=\")|(?<=id=\")|(?<=[a-z] )|(?<=[a-z] #))\d{1,3}(?=\W)")
_SENTENCE = re.compile(r"[^\n]{80,400}?[.!?;](?: +|(?=\n)|$)|[^\n]{1,400}|\n+", re.MULTILINE)
_DIGIT = re.compile(r"\d")
_JSON_START = re.compile(r"(?:(?<=[\s:=>])|^)[{\[](?=[\s\"{\[])")
_LONGEST_JSON = 1 << 20
_SCHEMAS = {"parameters", "input_schema", "inputSchema"}
_ITEM = re.compile(r"[\[,]\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a part's text. The texts of a part's pieces, joined, are the part's text.

    Attributes
    ----------
    meaning
        Hash that is equal for spellings of the same: whitespace and the order of JSON keys do not count.
    """

    text: str
    kind: Kind
    meaning: int


def cut(text: str, kind: Kind) -> tuple[Piece, ...]:
    """Cut a part's text into pieces."""
    if kind is not Kind.TEXT:
        return (_piece(text, kind),) if text else ()
    pieces: list[Piece] = []
    begin = 0
    for document in _documents(text):
        pieces.extend(_plain(text[begin : document.start()]))
        pieces.extend(_numbered(document.group()))
        begin = document.end()
    pieces.extend(_plain(text[begin:]))
    return tuple(_with_context(pieces))


def canonical_json(text: str) -> str | None:
    """Return JSON text with sorted keys and no spaces; None if it is not JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _piece(text: str, kind: Kind) -> Piece:
    meaning = (canonical_json(text) if kind in (Kind.TOOL, Kind.JSON) else None) or " ".join(text.split())
    return Piece(text, kind, xxh3_64_intdigest(meaning.encode("utf-8", "surrogatepass"), kind))


def _documents(text: str) -> list[re.Match[str]]:
    found = list(_TAGGED.finditer(text))
    if len(found) >= 2:
        return found
    heads = [match.start() for match in _HEADED.finditer(text)]
    if len(heads) < 2:
        return []
    documents = []
    for begin, end in zip(heads, [*heads[1:], len(text)], strict=True):
        # A document ends where the next begins; the last one at the first blank line behind it.
        match = (_LAST_DOCUMENT if end == len(text) else _ANYTHING).match(text, begin, end)
        if match:
            documents.append(match)
    return documents


def _numbered(text: str) -> Iterator[Piece]:
    """Split a document's number and the space behind it off: these belong to the place, not to the document."""
    document, space = text.rstrip(), text[len(text.rstrip()) :]
    yield from _document(document)
    if space:
        yield _piece(space, Kind.MARKER)


def _document(text: str) -> Iterator[Piece]:
    head = text[: text.find("\n") + 1 or len(text)][:120]
    number = _ORDINAL.search(head)
    if number is None:
        yield _piece(text, Kind.DOCUMENT)
        return
    yield _piece(text[: number.start()], Kind.MARKER)
    yield _piece(number.group(), Kind.ORDINAL)
    yield _piece(text[number.end() :], Kind.DOCUMENT)


def _plain(text: str) -> Iterator[Piece]:
    begin = 0
    for start, end, value in _json_spans(text):
        yield from _lines(text[begin:start])
        if _is_tool(value):
            yield _piece(text[start:end], Kind.TOOL)
        elif isinstance(value, list) and value and all(map(_is_tool, value)):
            yield from _tool_list(text[start:end])
        else:
            yield _piece(text[start:end], Kind.JSON)
        begin = end
    yield from _lines(text[begin:])


def _is_tool(value: Any) -> bool:
    """Say whether JSON defines a tool, in OpenAI's or Anthropic's shape or as the bare function."""
    if not isinstance(value, dict):
        return False
    inner = value.get("function", value)
    return isinstance(inner, dict) and isinstance(inner.get("name"), str) and bool(_SCHEMAS & inner.keys())


def _tool_list(text: str) -> Iterator[Piece]:
    """Cut a JSON list into its items, and the signs and spaces around these."""
    decoder = json.JSONDecoder()
    begin = 0
    while match := _ITEM.match(text, begin):
        yield _piece(match.group(), Kind.MARKER)
        _, end = decoder.raw_decode(text, match.end())
        yield _piece(text[match.end() : end], Kind.TOOL)
        begin = end
    yield _piece(text[begin:], Kind.MARKER)


def _json_spans(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield where objects and lists of some length stand, which start a line or follow a colon or space; and they."""
    decoder = json.JSONDecoder()
    position = 0
    while True:
        match = _JSON_START.search(text, position)
        if match is None:
            return
        start = match.start()
        try:
            value, end = decoder.raw_decode(text, start) if len(text) - start < _LONGEST_JSON else (None, start + 1)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        if end - start >= 16:
            yield start, end, value
        position = end


def _lines(text: str) -> Iterator[Piece]:
    """Yield lines (long ones sentence by sentence) with the whitespace behind them, and the values in them apart."""
    if not text:
        return
    pending = ""
    for match in _SENTENCE.finditer(text):
        run = match.group()
        if run.isspace():
            pending += run
            continue
        if pending.strip():
            yield from _values(pending)
            pending = ""
        pending += run
    yield from _values(pending)


def _values(text: str) -> Iterator[Piece]:
    if not text:
        return
    begin = 0
    for start, end, kind in _literals(text):
        if start > begin:
            yield _piece(text[begin:start], Kind.TEXT)
        yield _piece(text[start:end], kind)
        begin = end
    if begin < len(text):
        yield _piece(text[begin:], Kind.TEXT)


def _literals(text: str) -> list[tuple[int, int, Kind]]:
    """Find dates, ids and counters, without overlaps; the family that comes first in the table of causes wins."""
    if not _DIGIT.search(text):
        return []
    found: list[tuple[int, int, Kind]] = []
    for cause in CAUSES:
        for kind, pattern in cause.literals.items():
            group = "value" if "value" in pattern.groupindex else 0
            for match in pattern.finditer(text):
                start, end = match.span(group)
                if end > start and all(end <= s or start >= e for s, e, _ in found):
                    found.append((start, end, kind))
    return sorted(found)


def _with_context(pieces: list[Piece]) -> Iterator[Piece]:
    """Tie values to the text in front of them: "3" after "Request #" is not the "3" of another sentence."""
    before = 0
    for piece in pieces:
        if piece.kind in (Kind.CLOCK, Kind.IDENTIFIER, Kind.COUNTER):
            tied = xxh3_64_intdigest(f"{before}:{piece.meaning}".encode())
            yield Piece(piece.text, piece.kind, tied)
        else:
            if piece.kind is Kind.TEXT and not piece.text.isspace():
                before = piece.meaning
            yield piece
