"""Why prompts were not cached, and the results of audits that engines made."""

from __future__ import annotations

import re

from aiohttp import web

from tierkv.errors import InvalidRequest, NotFound
from tierkv.insight.live import NOTHING
from tierkv.service.audits import parse_audits
from tierkv.service.context import CONTEXT
from tierkv.service.messages import AuditsRequest, parse
from tierkv.service.query import DAY_PATTERN, query_text

__all__ = ["ROUTES"]


async def insight(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    seconds = _window(request)
    if context.insight is None:
        return context.answer(request, NOTHING)
    audience = context.audience(request)
    if seconds is None:
        return context.answer(request, await context.in_thread(context.insight.report, audience))
    return context.answer(request, await context.in_thread(context.insight.report_window, seconds, audience))


def _window(request: web.Request) -> float | None:
    text = query_text(request, "window")
    if text is None:
        return None
    if not re.fullmatch(DAY_PATTERN, text):
        raise InvalidRequest(f"window cannot be {text[:100]!r}", remedy="give whole seconds, 1 to 86400, a day")
    return float(text)


async def audits(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    if context.insight is None:
        raise NotFound("this daemon keeps no audits", remedy="set insight.enabled")
    results = parse_audits(parse(AuditsRequest, await context.message(request)).audits)
    await context.in_thread(context.insight.audited, context.tenant(request), results)
    return context.answer(request, {"accepted": len(results)})


ROUTES = [web.get("/v1/insight", insight), web.post("/v1/insight/audits", audits)]
