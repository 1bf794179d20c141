"""What there is: segments of the cold tier, and tenants."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tierkv.service.context import CONTEXT

__all__ = ["ROUTES"]

_NOTHING: dict[str, Any] = {"capacity_bytes": 0, "used_bytes": 0, "segments": [], "damage": {}, "findings": []}


async def segments(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    cold = context.engine.placement.cold
    described = _NOTHING if cold is None else await context.in_thread(cold.describe)
    return context.answer(request, {name: described[name] for name in _NOTHING})


async def tenants(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return context.answer(request, {"tenants": context.stats()["tenants"]})


ROUTES = [web.get("/v1/segments", segments), web.get("/v1/tenants", tenants)]
