"""What stands in a URL: query parameters and hashes, each named at most once and checked."""

from __future__ import annotations

import re

from aiohttp import web

from tierkv.errors import InvalidRequest
from tierkv.keys import HASH_BYTES

__all__ = [
    "DAY_PATTERN",
    "HASH_PATTERN",
    "NUMBER_PATTERN",
    "SECONDS_PATTERN",
    "WHOLE_PATTERN",
    "parse_hash",
    "query_seconds",
    "query_text",
    "query_whole",
]

HASH_PATTERN = f"^[0-9a-f]{{{2 * HASH_BYTES}}}$"
WHOLE_PATTERN = "^[0-9]{1,9}$"
NUMBER_PATTERN = "^[0-9]{1,18}$"
DAY_PATTERN = "^([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2}|86400)$"
"""Whole seconds, from one to a day."""
SECONDS_PATTERN = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"


def query_text(request: web.Request, name: str) -> str | None:
    """Return a query parameter, None without it. Raises `InvalidRequest` when it is there twice."""
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise InvalidRequest(f"{name} is given {len(values)} times", remedy="give it once")
    return values[0] if values else None


def query_whole(request: web.Request, name: str, default: int) -> int:
    """Return a query parameter that is a whole number. Raises `InvalidRequest`."""
    text = query_text(request, name)
    if text is None:
        return default
    if not re.fullmatch(WHOLE_PATTERN, text):
        raise InvalidRequest(f"{name} cannot be {text[:100]!r}", remedy="give a whole number")
    return int(text)


def query_seconds(request: web.Request, name: str, default: float) -> float:
    """Return a query parameter that is a time from 0 in seconds. Raises `InvalidRequest`."""
    text = query_text(request, name)
    if text is None:
        return default
    if not re.fullmatch(SECONDS_PATTERN, text):
        raise InvalidRequest(f"{name} cannot be {text[:100]!r}", remedy="give seconds, such as 0.5")
    return float(text)


def parse_hash(digits: str) -> bytes:
    """Return the chain hash that a URL names a block by. Raises `InvalidRequest`."""
    if not re.fullmatch(HASH_PATTERN, digits):
        raise InvalidRequest(
            f"{digits[:100]!r} does not name a block", remedy="give the 64 hex digits of its chain hash, in lower case"
        )
    return bytes.fromhex(digits)
