"""Sessions: end and pause."""

from __future__ import annotations

from aiohttp import web

from tierkv.service.context import CONTEXT
from tierkv.service.messages import PauseRequest, parse

__all__ = ["ROUTES"]


async def end(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    retired = context.engine.hints.end_session(context.tenant(request), info.name, request.match_info["id"])
    return context.answer(request, {"retired": retired})


async def pause(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    expected_s = parse(PauseRequest, await context.message(request)).expected_s
    held = context.engine.hints.pause_session(context.tenant(request), info.name, request.match_info["id"], expected_s)
    return context.answer(request, {"held": held})


ROUTES = [
    web.post("/v1/{ns}/sessions/{id}/end", end),
    web.post("/v1/{ns}/sessions/{id}/pause", pause),
]
