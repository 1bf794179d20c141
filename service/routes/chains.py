"""Chains: lookup, prefetch, acquire, reserve, pin."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from tierkv.core.acquiring import Terms
from tierkv.core.steps import run_async
from tierkv.insight.breakpoints import TTL_S
from tierkv.service.context import CONTEXT, Context
from tierkv.service.logs import ASKED_WAIT_S
from tierkv.service.messages import (
    AcquireRequest,
    BreakpointsRequest,
    ChainRequest,
    LookupRequest,
    PinRequest,
    PrefetchRequest,
    ReserveRequest,
    TouchRequest,
    parse,
)
from tierkv.wire import HIT_HEADER, MISS_HEADER, pack_choice, pack_grants, pack_hit, pack_refs

__all__ = ["ROUTES"]


async def lookup(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(LookupRequest, await context.message(request))
    chain = message.chain(info, context.config.limits.blocks)
    wait_s = request[ASKED_WAIT_S] = min(message.wait_s, context.config.limits.wait)
    hit = await run_async(context.engine.reader.find(context.tenant(request), info.name, chain, wait_s))
    return context.answer(request, pack_hit(hit))


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
    message = parse(PrefetchRequest, await context.message(request))
    chain = message.chain(info, context.config.limits.blocks)
    deadline_s = min(message.deadline_s, context.config.limits.lease)
    ticket = context.engine.prefetcher.start(context.tenant(request), info.name, chain, deadline_s)
    return context.answer(request, {"ticket": ticket}, status=202)


async def acquire(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(AcquireRequest, await context.message(request))
    limits = context.config.limits
    terms = Terms(
        _readable(context, message.tiers),
        limits.wait if message.wait_s is None else min(message.wait_s, limits.wait),
        min(message.ttl_s, limits.lease),
        message.max_blocks,
        min(message.compute_s, limits.lease),
        message.prefill_tokens_per_s,
        message.session,
        None if message.groups is None else tuple(message.groups),
        message.handoff,
        message.tokens if context.config.insight.text and message.tokens else None,
    )
    chain = message.chain(info, limits.blocks)
    request[ASKED_WAIT_S] = terms.wait_s
    tenant = context.tenant(request)
    acquired = await run_async(context.engine.reader.acquire(tenant, info.name, chain, terms))
    grant = acquired.compute
    if _hung_up(request):
        for lease in filter(None, (acquired.id, grant.id if grant else "")):
            context.engine.release(tenant, lease)
    response = context.answer(
        request,
        {
            "lease": acquired.id,
            "ttl_s": terms.ttl_s,
            "blocks": pack_refs(acquired.blocks),
            "hit_blocks": acquired.hit_blocks,
            "hit_tokens": acquired.hit_tokens,
            "published_blocks": acquired.published_blocks,
            "tokens_by_tier": dict(acquired.tokens_by_tier),
            "missed_tokens": dict(acquired.missed_tokens),
            "saved_s": acquired.saved_s,
            "waited_s": acquired.waited_s,
            "choice": pack_choice(acquired.choice),
            "compute": None if grant is None else [grant.id, grant.start, grant.stop],
            "computed_elsewhere": acquired.computed_elsewhere,
        },
    )
    response.headers[HIT_HEADER] = _in_short(acquired.tokens_by_tier)
    response.headers[MISS_HEADER] = _in_short(acquired.missed_tokens)
    return response


async def pin(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(PinRequest, await context.message(request))
    chain = message.chain(info, context.config.limits.blocks)
    ttl_s = min(message.ttl_s, context.config.limits.pin)
    pinned = context.engine.hints.pin(context.tenant(request), info.name, chain, ttl_s)
    return context.answer(request, {"blocks": pinned.blocks, "nbytes": pinned.nbytes, "ttl_s": ttl_s})


async def breakpoints(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(BreakpointsRequest, await context.message(request))
    chain, block_tokens = message.chain(info, context.config.limits.blocks), info.spec.block_tokens
    points = [
        (
            len(chain) if point.tokens is None else point.tokens // block_tokens,
            min(TTL_S[point.ttl], context.config.limits.pin),
        )
        for point in message.breakpoints
    ]
    placed = context.engine.hints.place(context.tenant(request), info.name, chain, points)
    answers = [
        {"tokens": held.blocks * block_tokens, "blocks": held.blocks, "nbytes": held.nbytes, "ttl_s": ttl_s}
        for held, ttl_s in placed
    ]
    return context.answer(request, {"breakpoints": answers})


async def unpin(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    chain = parse(ChainRequest, await context.message(request)).chain(info, context.config.limits.blocks)
    return context.answer(request, {"blocks": context.engine.hints.unpin(context.tenant(request), info.name, chain)})


async def reserve(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(ReserveRequest, await context.message(request))
    limits = context.config.limits
    tenant = context.tenant(request)
    step = context.engine.writer.reserve(
        tenant,
        info.name,
        message.chain(info, limits.blocks),
        start=message.start,
        stop=message.stop,
        wait_s=min(message.wait_s, limits.wait),
        ttl_s=min(message.ttl_s, limits.lease),
        tiers=_addressable(context, message.tiers),
        session=message.session,
    )
    request[ASKED_WAIT_S] = min(message.wait_s, limits.wait)
    reserved = await run_async(step)
    if _hung_up(request) and reserved.id:
        context.engine.writer.abort(tenant, reserved.id)
    return context.answer(
        request,
        {
            "lease": reserved.id,
            "ttl_s": min(message.ttl_s, limits.lease),
            "grants": pack_grants(reserved.grants),
            "waited_s": reserved.waited_s,
        },
    )


def _hung_up(request: web.Request) -> bool:
    """Say whether the caller has gone, and will not hold what it was just given."""
    return request.transport is None or request.transport.is_closing()


def _in_short(tokens: Mapping[str, int]) -> str:
    """Tokens by tier or by reason, as a header says them."""
    return ", ".join(f"{name}={count}" for name, count in tokens.items()) or "none"


def _readable(context: Context, attached: list[str] | None) -> frozenset[str]:
    """Memory tiers to read from: those the caller has attached, a GPU's too, or for HTTP bodies as `_addressable`."""
    if attached is None:
        return _addressable(context, None)
    return frozenset(m.tier.name for m in context.engine.placement.memory) & frozenset(attached)


def _addressable(context: Context, mapped: list[str] | None) -> frozenset[str]:
    """Memory tiers to write to: those the caller has mapped, or for HTTP bodies all that the daemon can address."""
    addressable = frozenset(m.tier.name for m in context.engine.placement.memory if m.tier.addressable)
    return addressable if mapped is None else addressable & frozenset(mapped)


ROUTES = [
    web.post("/v1/{ns}/lookup", lookup),
    web.post("/v1/{ns}/touch", touch),
    web.post("/v1/{ns}/prefetch", prefetch),
    web.post("/v1/{ns}/acquire", acquire),
    web.post("/v1/{ns}/reserve", reserve),
    web.post("/v1/{ns}/pin", pin),
    web.post("/v1/{ns}/breakpoints", breakpoints),
    web.post("/v1/{ns}/unpin", unpin),
]
