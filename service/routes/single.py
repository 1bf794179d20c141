"""One block by its chain hash: what curl can do. Engines use leases and many blocks a request."""

from __future__ import annotations

import re
from asyncio import IncompleteReadError

from aiohttp import web

from tierkv.core.single import Found
from tierkv.core.state import NamespaceInfo
from tierkv.core.steps import run_async
from tierkv.errors import BlockTooLarge, BodyMismatch, ChecksumMismatch, Conflict, InvalidRequest, NotFound
from tierkv.service.context import CONTEXT
from tierkv.service.logs import ASKED_WAIT_S
from tierkv.service.query import parse_hash, query_seconds, query_text, query_whole
from tierkv.storage.tier import checksum
from tierkv.wire import CHECKSUM_HEADER, CHECKSUM_PATTERN, PAYLOAD_TYPE, TIER_HEADER

__all__ = ["ROUTES"]

_WAIT_S = 10.0
_ROOM_WAIT_S = 1.0
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


async def get(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info, chain_hash, group = _named(request)
    tenant, single = context.tenant(request), context.engine.single
    wait_s = min(query_seconds(request, "wait_s", _WAIT_S), context.config.limits.wait)
    request[ASKED_WAIT_S] = wait_s
    found = single.find(tenant, info.name, chain_hash, group)
    if _unchanged(request, found.checksum):
        return web.Response(status=304, headers=_headers(request, found.checksum, found.tier))
    held = await run_async(single.read(tenant, info.name, chain_hash, group, wait_s=wait_s))
    payload = await context.in_thread(single.copy, tenant, held)
    headers = _headers(request, held.ref.checksum, found.tier)
    part = _range(request, held.ref.checksum, len(payload))
    if part is None:
        return web.Response(body=payload, content_type=PAYLOAD_TYPE, headers=headers)
    headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(payload)}"
    body = payload[part.start : part.stop]
    return web.Response(status=206, body=body, content_type=PAYLOAD_TYPE, headers=headers)


async def head(request: web.Request) -> web.Response:
    info, chain_hash, group = _named(request)
    context = request.app[CONTEXT]
    found = context.engine.single.find(context.tenant(request), info.name, chain_hash, group)
    headers = _headers(request, found.checksum, found.tier)
    if _unchanged(request, found.checksum):
        return web.Response(status=304, headers=headers)
    headers["Content-Length"] = str(found.length)
    return web.Response(content_type=PAYLOAD_TYPE, headers=headers)


async def put(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info, chain_hash, group = _named(request)
    tenant, single = context.tenant(request), context.engine.single
    digits = query_text(request, "parent")
    parent = None if digits is None else parse_hash(digits)
    if request.content_type != PAYLOAD_TYPE:
        raise InvalidRequest(
            f"content type {request.content_type[:100]!r} is not understood",
            remedy=f"send {PAYLOAD_TYPE}, or no Content-Type",
        )
    announced = request.headers.get(CHECKSUM_HEADER)
    if announced is not None and not CHECKSUM_PATTERN.fullmatch(announced):
        raise InvalidRequest(f"{CHECKSUM_HEADER} cannot be {announced[:100]!r}", remedy="give 16 hex digits")
    payload = await _payload(request, single.size(info.name, group))
    if announced is not None and await context.in_thread(checksum, payload) != int(announced, 16):
        raise ChecksumMismatch("the body does not have the checksum it was sent with", remedy="send it again")
    step = single.reserve(tenant, info.name, chain_hash, group, parent=parent, wait_s=_ROOM_WAIT_S)
    reserved = await run_async(step)
    if reserved is not None:
        await context.in_thread(single.write, tenant, reserved, payload)
    found = _stored(request, info, chain_hash, group)
    answer = {
        "stored": reserved is not None,
        "length": found.length,
        "checksum": f"{found.checksum:016x}",
        "depth": found.depth,
    }
    response = context.answer(request, answer, status=200 if reserved is None else 201)
    response.headers["ETag"] = _etag(found.checksum)
    return response


async def delete(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    info = context.namespace(request)
    chain_hash = parse_hash(request.match_info["hash"])
    removed = await context.in_thread(context.engine.delete, context.tenant(request), info.name, chain_hash)
    return context.answer(request, {"removed": removed})


def _named(request: web.Request) -> tuple[NamespaceInfo, bytes, int]:
    """Namespace, chain hash and group of the block that a request names."""
    info = request.app[CONTEXT].namespace(request)
    return info, parse_hash(request.match_info["hash"]), query_whole(request, "group", 0)


def _stored(request: web.Request, info: NamespaceInfo, chain_hash: bytes, group: int) -> Found:
    context = request.app[CONTEXT]
    try:
        return context.engine.single.find(context.tenant(request), info.name, chain_hash, group)
    except NotFound:
        raise Conflict(
            "the block before this one, or this one, was removed meanwhile", remedy="store the chain again"
        ) from None


async def _payload(request: web.Request, size: int) -> bytes:
    """Receive a body of exactly one block."""
    length, limit = request.content_length, request.app[CONTEXT].config.limits.body
    if size > limit or (length is not None and length > size):
        raise BlockTooLarge(
            f"a body is announced with {length} bytes; the block has {size}, and the limit is {limit}",
            remedy="send one block, or raise limits.body",
        )
    if length != size:
        raise BodyMismatch(
            f"a body is announced with {length} bytes; the block has {size}",
            remedy="send exactly one block, with its Content-Length",
        )
    try:
        return await request.content.readexactly(size)
    except IncompleteReadError:
        raise BodyMismatch(
            "the body ended before the announced bytes had arrived", remedy="nothing was stored; send it again"
        ) from None


def _headers(request: web.Request, block_checksum: int, tier: str) -> dict[str, str]:
    return {
        **request.app[CONTEXT].headers(),
        "ETag": _etag(block_checksum),
        "Accept-Ranges": "bytes",
        TIER_HEADER: tier,
    }


def _etag(block_checksum: int) -> str:
    return f'"{block_checksum:016x}"'


def _unchanged(request: web.Request, block_checksum: int) -> bool:
    """Whether the caller has the block already (RFC 9110, 13.1.2)."""
    return any(tag.value in ("*", f"{block_checksum:016x}") for tag in request.if_none_match or ())


def _range(request: web.Request, block_checksum: int, size: int) -> range | None:
    """The bytes asked for; None for all of them, also where RFC 9110 lets a server ignore what it is asked.

    Raises aiohttp's error for a range outside the block.
    """
    match = _RANGE.fullmatch(request.headers.get("Range", ""))
    if match is None or match[1] == match[2] == "":
        return None
    if request.headers.get("If-Range", _etag(block_checksum)) != _etag(block_checksum):
        return None
    if match[1]:
        start, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    else:
        start, stop = max(0, size - int(match[2])), size
    if start >= stop:
        raise web.HTTPRequestRangeNotSatisfiable(
            headers={"Content-Range": f"bytes */{size}"}, reason=f"the block has {size} bytes"
        )
    return range(start, stop)


ROUTES = [
    web.get("/v1/{ns}/blocks/{hash}", get, allow_head=False),
    web.head("/v1/{ns}/blocks/{hash}", head),
    web.put("/v1/{ns}/blocks/{hash}", put),
    web.delete("/v1/{ns}/blocks/{hash}", delete),
]
