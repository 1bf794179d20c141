"""Tickets of prefetches: progress, wait, cancel."""

from __future__ import annotations

from aiohttp import web

from tierkv.core.steps import run_async
from tierkv.service.context import CONTEXT
from tierkv.service.logs import ASKED_WAIT_S
from tierkv.service.messages import WaitRequest, parse
from tierkv.wire import pack_progress

__all__ = ["ROUTES"]


async def progress(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    found = context.engine.prefetcher.progress(context.tenant(request), request.match_info["id"])
    return context.answer(request, pack_progress(found))


async def wait(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    message = parse(WaitRequest, await context.message(request))
    wait_s = min(message.wait_s, context.config.limits.wait)
    request[ASKED_WAIT_S] = wait_s
    step = context.engine.prefetcher.wait(context.tenant(request), request.match_info["id"], message.groups, wait_s)
    return context.answer(request, pack_progress(await run_async(step)))


async def cancel(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    context.engine.prefetcher.cancel(context.tenant(request), request.match_info["id"])
    return context.answer(request, {})


ROUTES = [
    web.get("/v1/tickets/{id}", progress, allow_head=False),
    web.post("/v1/tickets/{id}/wait", wait),
    web.delete("/v1/tickets/{id}", cancel),
]
