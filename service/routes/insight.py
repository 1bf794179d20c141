"""Why prompts were not cached, and the results of audits that engines made."""

from __future__ import annotations

from aiohttp import web

from tierkv.errors import NotFound
from tierkv.insight.live import NOTHING
from tierkv.service.audits import parse_audits
from tierkv.service.context import CONTEXT
from tierkv.service.messages import AuditsRequest, parse

__all__ = ["ROUTES"]


async def insight(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    if context.insight is None:
        return context.answer(request, NOTHING)
    report = await context.in_thread(context.insight.report, context.audience(request))
    return context.answer(request, report)


async def audits(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    if context.insight is None:
        raise NotFound("this daemon keeps no audits", remedy="set insight.enabled")
    results = parse_audits(parse(AuditsRequest, await context.message(request)).audits)
    await context.in_thread(context.insight.audited, context.tenant(request), results)
    return context.answer(request, {"accepted": len(results)})


ROUTES = [web.get("/v1/insight", insight), web.post("/v1/insight/audits", audits)]
