"""The prefix tree of what is in memory, folded for people."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from tierkv.core.trunks import Trunk
from tierkv.errors import InvalidRequest
from tierkv.service.context import CONTEXT, Context
from tierkv.service.query import query_whole

__all__ = ["ROUTES"]

_USUAL = 200
_MOST = 10_000


async def trunks(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    most = query_whole(request, "most", _USUAL)
    if most > _MOST:
        raise InvalidRequest(f"most cannot be {most}", remedy=f"ask for at most {_MOST} trunks")
    found = await context.in_thread(context.engine.trunks, most, context.audience(request))
    now = time.monotonic()
    return context.answer(request, {"trunks": [_plain(context, trunk, now) for trunk in found]})


def _plain(context: Context, trunk: Trunk, now: float) -> dict[str, Any]:
    tenant = context.engine.tenant_of(trunk.tenant)
    info = context.engine.namespace_of(trunk.namespace)
    return {
        "id": trunk.id,
        "parent": trunk.parent or None,
        "tenant": tenant.name if tenant is not None else None,
        "namespace": trunk.namespace.hex(),
        "model": info.spec.model if info is not None else None,
        "depth": trunk.depth,
        "blocks": trunk.blocks,
        "tokens": trunk.blocks * info.spec.block_tokens if info is not None else None,
        "nbytes": trunk.nbytes,
        "branches": trunk.branches,
        "uses": trunk.uses,
        "unused_s": max(0.0, now - trunk.used) if trunk.used else None,
    }


ROUTES = [web.get("/v1/trunks", trunks)]
