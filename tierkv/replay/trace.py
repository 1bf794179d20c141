"""Request traces: Mooncake's format, one JSON object a line, plain or gzipped.

    {"timestamp": 27482, "input_length": 6955, "hash_ids": [46, 47, 2353, 2354], "session_id": 3}

`timestamp` is in milliseconds, `input_length` in tokens, `hash_ids` names the blocks of the prompt: equal numbers mean
equal blocks behind equal prefixes. A block holds `block_tokens` tokens, the last one of a prompt what is left.
`session_id` is optional, other fields are ignored.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tierkv.errors import InvalidRequest, StorageError

__all__ = ["BLOCK_TOKENS", "Request", "Trace", "read_trace"]

BLOCK_TOKENS = 512
"""Tokens of a block in the published Mooncake traces."""

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes
    ----------
    timestamp
        Arrival, milliseconds.
    tokens
        Length of the prompt.
    blocks
        Its blocks, the first one first.
    session
        Which conversation it belongs to; None where the trace does not say.
    """

    timestamp: float
    tokens: int
    blocks: tuple[int, ...]
    session: int | str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: tuple[Request, ...]
    block_tokens: int = BLOCK_TOKENS

    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.tokens for request in self.requests)

    def references(self) -> int:
        """Blocks of all prompts, each as often as it is asked for."""
        return sum(len(request.blocks) for request in self.requests)

    def unique_blocks(self) -> int:
        """Blocks of all prompts, each once."""
        return len({block for request in self.requests for block in request.blocks})

    def tokens(self, request: Request, blocks: int) -> int:
        """Tokens of the first `blocks` blocks of a request."""
        return min(blocks * self.block_tokens, request.tokens)

    def hit_tokens(self, request: Request, resident: Container[int]) -> int:
        """Tokens of the longest run of resident blocks from a request's first."""
        hits = 0
        for block in request.blocks:
            if block not in resident:
                break
            hits += 1
        return self.tokens(request, hits)


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read a trace and sort it by timestamp; requests of one time keep their order.

    Raises `StorageError` if the file cannot be read, `InvalidRequest` naming file and line if one does not parse.
    """
    requests = [_parse(line, f"{path}:{number}", block_tokens) for number, line in _lines(path) if line.strip()]
    requests.sort(key=lambda request: request.timestamp)
    return Trace(tuple(requests), block_tokens)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as lines:
            for line in lines:
                number += 1
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidRequest(
            f"{path}:{number + 1}: the compressed file is damaged: {error}", remedy="get the trace again"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", remedy="name an existing, readable trace") from None


def _parse(line: bytes, where: str, block_tokens: int) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _malformed(where, "not a JSON object") from None
    if not isinstance(row, dict):
        raise _malformed(where, "not a JSON object")
    timestamp, tokens, blocks = row.get("timestamp"), row.get("input_length"), row.get("hash_ids")
    session = row.get("session_id")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not math.isfinite(timestamp):
        raise _malformed(where, "'timestamp' is not a number of milliseconds")
    if not _whole(tokens) or tokens < 0:
        raise _malformed(where, "'input_length' is not a number of tokens")
    if not isinstance(blocks, list) or not all(map(_whole, blocks)):
        raise _malformed(where, "'hash_ids' is not a list of whole numbers")
    if session is not None and not isinstance(session, str) and not _whole(session):
        raise _malformed(where, "'session_id' is neither a whole number nor text")
    if len(blocks) != -(-tokens // block_tokens):
        raise InvalidRequest(
            f"{where}: {tokens} tokens do not make {len(blocks)} blocks of {block_tokens}",
            remedy="give the block size of the trace with --block-tokens",
        )
    return Request(timestamp, tokens, tuple(blocks), session)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _malformed(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", remedy="a line is an object of timestamp, input_length and hash_ids")
