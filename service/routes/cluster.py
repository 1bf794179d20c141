"""What several daemons hold: `where` for clients and routers, and what nodes ask each other for it."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from tierkv.cache import Hit
from tierkv.connected import NodeHit, Where
from tierkv.core.state import NamespaceInfo
from tierkv.errors import InvalidRequest
from tierkv.service.cluster.peers import PEER_ROUTE, Answer
from tierkv.service.cluster.signing import NODE_HEADER, read_signature
from tierkv.service.context import CONTEXT
from tierkv.service.logs import ASKED_WAIT_S
from tierkv.service.messages import PeerRequest, WhereRequest, parse
from tierkv.wire import pack_where

__all__ = ["ROUTES"]


async def where(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    message = parse(WhereRequest, await context.message(request))
    chain = message.chain(info, context.config.limits.blocks)
    tenant = context.tenant(request)
    wait_s = request[ASKED_WAIT_S] = min(message.wait_s, context.config.limits.wait)
    others = await context.peers.ask(tenant.name, info.name, chain, wait_s)
    hit = context.engine.reader.lookup(tenant, info.name, chain, ask=False)
    here = Answer("", context.peers.node, hit.blocks, hit.tokens, _by_tier(hit, info))
    nodes = sorted((here, *others), key=_rank)
    return context.answer(request, pack_where(Where(len(chain), tuple(map(_node_hit, nodes)))))


async def peer_lookup(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    signature = read_signature(request.headers.getall(NODE_HEADER, []))
    context.peers.key.check(signature, "POST", PEER_ROUTE, await request.read())
    message = parse(PeerRequest, await context.message(request))
    limit = context.config.limits.blocks
    if len(message.hashes) > limit:
        raise InvalidRequest(
            f"the chain has {len(message.hashes)} blocks, and {limit} are allowed", remedy="ask for less"
        )
    info = context.engine.namespace(message.namespace)
    hit = context.engine.reader.lookup(context.engine.tenant(message.tenant), info.name, message.hashes, ask=False)
    return context.answer(
        request,
        {
            "node": context.peers.node,
            "instance": context.peers.instance,
            "blocks": hit.blocks,
            "tokens": hit.tokens,
            "tokens_by_tier": _by_tier(hit, info),
        },
    )


def _by_tier(hit: Hit, info: NamespaceInfo) -> dict[str, int]:
    return {tier: blocks * info.spec.block_tokens for tier, blocks in Counter(hit.tiers).items()}


def _rank(answer: Answer) -> tuple[bool, int, int]:
    """Whoever holds most itself first: what the shared tier has is as near to all."""
    own = answer.tokens - answer.tokens_by_tier.get("shared", 0)
    return answer.error is not None, -own, -answer.tokens


def _node_hit(answer: Answer) -> NodeHit:
    return NodeHit(
        answer.node or None,
        answer.url or None,
        answer.blocks,
        answer.tokens,
        answer.tokens_by_tier,
        answer.error,
        answer.detail,
        answer.age_s,
    )


ROUTES = [
    web.post("/v1/{ns}/where", where),
    web.post(PEER_ROUTE, peer_lookup),
]
