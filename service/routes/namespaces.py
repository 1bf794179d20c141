"""Namespaces: register, list, clear."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tierkv.core.state import NamespaceInfo
from tierkv.service.context import CONTEXT
from tierkv.service.messages import parse_spec

__all__ = ["ROUTES"]


def _describe(info: NamespaceInfo) -> dict[str, Any]:
    return {
        "namespace": info.name,
        "model": info.spec.model,
        "block_tokens": info.spec.block_tokens,
        "block_bytes": [layout.nbytes for layout in info.layouts],
    }


async def register(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    spec = parse_spec(await context.message(request))
    return context.answer(request, _describe(context.engine.register(spec)))


async def listing(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return context.answer(request, {"namespaces": [_describe(info) for info in context.engine.namespaces()]})


async def clear(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    removed = await context.in_thread(context.engine.clear, context.tenant(request), info.name)
    return context.answer(request, {"removed": removed})


ROUTES = [
    web.put("/v1/namespaces", register),
    web.get("/v1/namespaces", listing),
    web.delete("/v1/namespaces/{ns}", clear),
]
