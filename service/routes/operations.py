"""What operators and local clients ask: attach, stats, flush, metrics, health."""

from __future__ import annotations

import logging
import os
import socket
import struct
from typing import Any

from aiohttp import web

from tierkv.errors import DeviceError, InvalidRequest
from tierkv.service.context import CONTEXT, Context
from tierkv.service.metrics import render
from tierkv.storage.hot import DeviceHotTier, HotTier
from tierkv.storage.warm import WarmTier

__all__ = ["ROUTES"]

log = logging.getLogger(__name__)


async def attach(request: web.Request) -> web.Response:
    """Tell a local client of the same user where the memory tiers are mapped from."""
    context = request.app[CONTEXT]
    if _peer_uid(request) != os.getuid():
        raise InvalidRequest(
            "shared memory is for processes of the daemon's user on its Unix socket", remedy="use HTTP bodies instead"
        )
    segments: list[dict[str, Any]] = []
    for memory in context.engine.placement.memory:
        tier = memory.tier
        if isinstance(tier, WarmTier | HotTier):
            segments.append({"tier": tier.name, "path": str(tier.path), "generation": f"{tier.generation:016x}"})
            if isinstance(tier, WarmTier):
                segments[-1]["directory"] = [tier.directory_offset, tier.directory_bytes]
    answer = {
        "generation": context.generation,
        "segments": segments,
        "device": _device(context),
        "tenant_key": context.tenant(request).key,
    }
    return context.answer(request, answer)


async def stats(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return context.answer(request, context.stats_for(request))


async def flush(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    await context.in_thread(context.engine.flush)
    return context.answer(request, {})


async def metrics(request: web.Request) -> web.Response:
    body, content_type = render(request.app[CONTEXT].stats())
    return web.Response(body=body, headers={"Content-Type": content_type})


async def healthz(request: web.Request) -> web.Response:
    return request.app[CONTEXT].answer(request, {"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    reasons = context.unready()
    return context.answer(request, {"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)


def _device(context: Context) -> dict[str, Any] | None:
    """Say how to attach the tier that lies on a GPU, if there is one."""
    for memory in context.engine.placement.memory:
        if isinstance(memory.tier, DeviceHotTier):
            pool = memory.tier.pool
            try:
                handle = pool.export()
            except DeviceError as error:
                log.warning("clients read from the warm tier: %s", error)
                return None
            return {"tier": memory.tier.name, "bus_id": pool.device.bus_id, "nbytes": pool.nbytes, "handle": handle}
    return None


def _peer_uid(request: web.Request) -> int | None:
    """User id of the process at the other end of a Unix socket, None for TCP."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


ROUTES = [
    web.get("/v1/attach", attach),
    web.get("/v1/stats", stats),
    web.post("/v1/flush", flush),
    web.get("/metrics", metrics),
    web.get("/healthz", healthz),
    web.get("/readyz", readyz),
]
