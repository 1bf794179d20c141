"""The OpenAPI document of these routes."""

from __future__ import annotations

import json
from functools import cache

from aiohttp import web

from tierkv.service.context import CONTEXT
from tierkv.service.openapi import openapi_document
from tierkv.wire import JSON_TYPE

__all__ = ["ROUTES"]


async def document(request: web.Request) -> web.Response:
    headers = request.app[CONTEXT].headers()
    return web.Response(body=_encoded(), content_type=JSON_TYPE, headers=headers)


@cache
def _encoded() -> bytes:
    return json.dumps(openapi_document(), separators=(",", ":")).encode()


ROUTES = [web.get("/openapi.json", document)]
