"""What happens, as it happens: Server-Sent Events."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from functools import partial
from typing import get_args

from aiohttp import web

from tierkv.core.events import EventKind
from tierkv.errors import InvalidRequest, TierKVError
from tierkv.service.context import CONTEXT, Context
from tierkv.service.feed import FORMATS, MISSED, VLLM_KINDS, Feed, Selection
from tierkv.service.query import query_text, query_whole

__all__ = ["ROUTES"]

_EVENT_STREAM = "text/event-stream"
_KINDS = frozenset(get_args(EventKind))
_POSITION = re.compile(r"(?:(?P<generation>[0-9a-f]{16})-)?(?P<sequence>[0-9]{1,18})")


async def events(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    start, restarted = _start(context, request)
    feed = Feed(
        context.engine,
        context.generation,
        _selection(context, request),
        start,
        restarted=restarted,
        stats=partial(context.stats_for, request) if query_whole(request, "stats", 0) else None,
    )
    response = web.StreamResponse(headers={**context.headers(), "Cache-Control": "no-store"})
    response.content_type = _EVENT_STREAM
    await response.prepare(request)
    sending = asyncio.create_task(_send(context, request, feed, response))
    closing = asyncio.create_task(context.requests.closing.wait())
    try:
        await asyncio.wait((sending, closing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        closing.cancel()
        sending.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await sending
    return response


async def _send(context: Context, request: web.Request, feed: Feed, response: web.StreamResponse) -> None:
    """Send until the reader is gone, or its token was revoked."""
    with suppress(TierKVError):
        async for chunk in feed.chunks():
            context.authority.caller(request.headers)
            await response.write(chunk)


def _selection(context: Context, request: web.Request) -> Selection:
    form = query_text(request, "format") or FORMATS[0]
    if form not in FORMATS:
        raise InvalidRequest(f"format cannot be {form[:100]!r}", remedy=f"use {' or '.join(FORMATS)}")
    known = VLLM_KINDS if form == "vllm" else _KINDS
    text = query_text(request, "kinds")
    kinds = known if text is None else frozenset(text.split(","))
    unknown = sorted(kinds - known - ({MISSED} if form != "vllm" else set()))
    if unknown:
        raise InvalidRequest(
            f"no events are called {', '.join(unknown)[:100]!r}", remedy=f"known are {', '.join(sorted(known))}"
        )
    return Selection(kinds, context.audience(request), "vllm" if form == "vllm" else "tierkv")


def _start(context: Context, request: web.Request) -> tuple[int, bool]:
    """Return the number of the last event that the reader has, and whether it had it from another run."""
    latest = context.engine.last_event
    text = request.headers.get("Last-Event-ID") or query_text(request, "after")
    if not text:
        return max(0, latest - query_whole(request, "last", 0)), False
    match = _POSITION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text[:100]!r} is not the id of an event", remedy="give the id that came with one")
    if match["generation"] not in (None, context.generation):
        return 0, True
    return min(int(match["sequence"]), latest), False


ROUTES = [web.get("/v1/events", events, allow_head=False)]
