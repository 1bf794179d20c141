"""Chains: lookup, prefetch, acquire, reserve, delete."""

from __future__ import annotations

import re

from aiohttp import web

from tierkv.core.steps import run_async
from tierkv.errors import InvalidRequest
from tierkv.keys import HASH_BYTES
from tierkv.service.context import CONTEXT, Context
from tierkv.service.messages import AcquireRequest, ChainRequest, ReserveRequest, TouchRequest, parse
from tierkv.wire import pack_grants, pack_hit, pack_progress, pack_refs

__all__ = ["ROUTES"]

_HASH = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")


async def lookup(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    chain = parse(ChainRequest, await context.message(request)).chain(info, context.config.limits.blocks)
    return context.answer(request, pack_hit(context.engine.reader.lookup(context.tenant(request), info.name, chain)))


async def touch(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(TouchRequest, await context.message(request))
    chain = message.chain(info, context.config.limits.blocks)
    context.engine.uses.report(context.tenant(request), info.name, message.group, chain)
    return context.answer(request, {})


async def prefetch(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    chain = parse(ChainRequest, await context.message(request)).chain(info, context.config.limits.blocks)
    ticket = context.engine.reader.prefetch(context.tenant(request), info.name, chain)
    return context.answer(request, {"ticket": ticket}, status=202)


async def progress(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    found = context.engine.reader.progress(context.tenant(request), request.match_info["id"])
    return context.answer(request, pack_progress(found))


async def cancel(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    context.engine.reader.cancel(context.tenant(request), request.match_info["id"])
    return context.answer(request, {})


async def acquire(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(AcquireRequest, await context.message(request))
    limits = context.config.limits
    step = context.engine.reader.acquire(
        context.tenant(request),
        info.name,
        message.chain(info, limits.blocks),
        wait_s=limits.wait if message.wait_s is None else min(message.wait_s, limits.wait),
        ttl_s=min(message.ttl_s, limits.lease),
        max_blocks=message.max_blocks,
        tiers=_tiers(context, message.tiers),
    )
    acquired = await run_async(step)
    return context.answer(
        request,
        {
            "lease": acquired.id,
            "ttl_s": min(message.ttl_s, limits.lease),
            "blocks": pack_refs(acquired.blocks),
            "hit_blocks": acquired.hit_blocks,
            "hit_tokens": acquired.hit_tokens,
            "published_blocks": acquired.published_blocks,
            "tokens_by_tier": dict(acquired.tokens_by_tier),
            "waited_s": acquired.waited_s,
        },
    )


async def reserve(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(ReserveRequest, await context.message(request))
    limits = context.config.limits
    step = context.engine.writer.reserve(
        context.tenant(request),
        info.name,
        message.chain(info, limits.blocks),
        start=message.start,
        stop=message.stop,
        wait_s=min(message.wait_s, limits.wait),
        ttl_s=min(message.ttl_s, limits.lease),
        tiers=_tiers(context, message.tiers),
    )
    reserved = await run_async(step)
    return context.answer(
        request,
        {
            "lease": reserved.id,
            "ttl_s": min(message.ttl_s, limits.lease),
            "grants": pack_grants(reserved.grants),
            "waited_s": reserved.waited_s,
        },
    )


async def delete(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    digits = request.match_info["hash"]
    if not _HASH.fullmatch(digits):
        raise InvalidRequest(
            f"{digits[:100]!r} does not name a block", remedy="give the 64 hex digits of its chain hash, in lower case"
        )
    chain_hash = bytes.fromhex(digits)
    removed = await context.in_thread(context.engine.delete, context.tenant(request), info.name, chain_hash)
    return context.answer(request, {"removed": removed})


def _tiers(context: Context, mapped: list[str] | None) -> frozenset[str]:
    """Memory tiers to use: those the caller has mapped, or for HTTP bodies all that the daemon can address itself."""
    addressable = frozenset(m.tier.name for m in context.engine.placement.memory if m.tier.addressable)
    return addressable if mapped is None else addressable & frozenset(mapped)


ROUTES = [
    web.post("/v1/{ns}/lookup", lookup),
    web.post("/v1/{ns}/touch", touch),
    web.post("/v1/{ns}/prefetch", prefetch),
    web.get("/v1/tickets/{id}", progress, allow_head=False),
    web.delete("/v1/tickets/{id}", cancel),
    web.post("/v1/{ns}/acquire", acquire),
    web.post("/v1/{ns}/reserve", reserve),
    web.delete("/v1/{ns}/blocks/{hash}", delete),
]
