"""Sessions: end and pause."""

from __future__ import annotations

from aiohttp import web

from tierkv.errors import InvalidRequest
from tierkv.service.context import CONTEXT
from tierkv.service.messages import PauseRequest, parse
from tierkv.wire import SESSION_CHARACTERS

__all__ = ["ROUTES"]


async def end(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    retired = context.engine.hints.end_session(context.tenant(request), info.name, _session(request))
    return context.answer(request, {"retired": retired})


async def pause(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    expected_s = parse(PauseRequest, await context.message(request)).expected_s
    held = context.engine.hints.pause_session(context.tenant(request), info.name, _session(request), expected_s)
    return context.answer(request, {"held": held})


def _session(request: web.Request) -> str:
    name = request.match_info["id"]
    if len(name) > SESSION_CHARACTERS:
        raise InvalidRequest(f"a session's name has at most {SESSION_CHARACTERS} characters")
    return name


ROUTES = [
    web.post("/v1/{ns}/sessions/{id}/end", end),
    web.post("/v1/{ns}/sessions/{id}/pause", pause),
]
