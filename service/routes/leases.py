"""Leases: commit, abort, release, renew."""

from __future__ import annotations

from aiohttp import web

from tierkv.service.context import CONTEXT
from tierkv.service.messages import CommitRequest, ReleaseRequest, RenewRequest, parse
from tierkv.wire import unpack_written

__all__ = ["ROUTES"]


async def commit(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    written = unpack_written(parse(CommitRequest, await context.message(request)).blocks)
    lease = request.match_info["id"]
    accepted = await context.in_thread(context.engine.writer.commit, context.tenant(request), lease, written)
    return context.answer(request, {"accepted": accepted})


async def abort(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    context.engine.writer.abort(context.tenant(request), request.match_info["id"])
    return context.answer(request, {})


async def release(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    corrupt = parse(ReleaseRequest, await context.message(request)).corrupt
    tenant, lease = context.tenant(request), request.match_info["id"]
    if corrupt:
        await context.in_thread(context.engine.release, tenant, lease, corrupt)
    else:
        context.engine.release(tenant, lease)
    return context.answer(request, {})


async def renew(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    ttl_s = min(parse(RenewRequest, await context.message(request)).ttl_s, context.config.limits.lease)
    context.engine.renew(context.tenant(request), request.match_info["id"], ttl_s)
    return context.answer(request, {"ttl_s": ttl_s})


ROUTES = [
    web.post("/v1/leases/{id}/commit", commit),
    web.post("/v1/leases/{id}/abort", abort),
    web.post("/v1/leases/{id}/release", release),
    web.post("/v1/leases/{id}/renew", renew),
]
