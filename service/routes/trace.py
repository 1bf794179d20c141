"""What was recorded of the traffic, for whoever follows it."""

from __future__ import annotations

import re

from aiohttp import web

from tierkv.errors import InvalidRequest
from tierkv.service.context import CONTEXT
from tierkv.service.query import NUMBER_PATTERN, query_text

__all__ = ["ROUTES"]


async def trace(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    text = query_text(request, "after")
    if text is not None and not re.fullmatch(NUMBER_PATTERN, text):
        raise InvalidRequest(f"after cannot be {text[:100]!r}", remedy="give `last` of the answer before")
    after = None if text is None else int(text)
    page = await context.in_thread(context.recorder.since, after, context.audience(request))
    rows = [row.to_dict() for row in page.rows]
    return context.answer(request, {"rows": rows, "last": page.last, "missed": page.missed})


ROUTES = [web.get("/v1/trace", trace)]
