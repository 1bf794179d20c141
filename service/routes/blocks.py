"""Block bodies for clients that cannot map the arena: frames, many blocks a request, streamed both ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
from aiohttp import StreamReader, web

from tierkv.cache import BlockRef, Grant, Written
from tierkv.core.engine import Engine
from tierkv.errors import BlockTooLarge, BodyMismatch, InvalidRequest, LeaseLost
from tierkv.service.context import CONTEXT
from tierkv.service.messages import BlocksRequest, parse
from tierkv.storage.tier import Slot
from tierkv.wire import FRAME_BYTES, FRAME_TYPE, Frame, pack_frame, unpack_frame

__all__ = ["ROUTES"]

# Large enough to amortise a call, small enough to stay in the processor's cache and not to fill a huge send buffer.
_PIECE = 512 << 10
_CHUNK = 1 << 20


async def get(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    context.namespace(request)
    message = parse(BlocksRequest, await context.message(request))
    reader, tenant = context.engine.reader, context.tenant(request)
    refs = _chosen(reader.refs(tenant, message.lease), message.blocks)
    views = [_memory(context.engine, ref) for ref in refs]
    response = web.StreamResponse(headers=context.headers())
    response.content_type = FRAME_TYPE
    response.content_length = sum(FRAME_BYTES + ref.length for ref in refs)
    await response.prepare(request)
    for parts in _pieces(refs, views):
        # A copy, taken before the lease is looked at: what the socket does not take at once may outlive the lease.
        piece = b"".join(parts)
        try:
            reader.refs(tenant, message.lease)
        except LeaseLost:
            # The reader was so slow that its lease has ended: the memory may hold another tenant's block by now.
            response.force_close()
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write(piece)
    await response.write_eof()
    return response


async def put(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    limit = context.config.limits.body
    if request.content_length is None or request.content_length > limit:
        raise BlockTooLarge(
            f"a body of blocks needs a Content-Length of at most {limit} bytes", remedy="send fewer blocks at once"
        )
    if request.content_type != FRAME_TYPE:
        raise InvalidRequest(
            f"content type {request.content_type[:100]!r} is not understood", remedy=f"send {FRAME_TYPE}"
        )
    lease, tenant = request.query.get("lease", ""), context.tenant(request)
    writer = context.engine.writer
    grants = {(grant.index, grant.group): grant for grant in writer.grants(tenant, lease)}
    written: list[Written] = []
    remaining = request.content_length
    while remaining:
        frame = unpack_frame(b"".join([part async for part in _chunks(request.content, min(FRAME_BYTES, remaining))]))
        grant = grants.pop((frame.index, frame.group), None)
        if grant is None:
            raise InvalidRequest(f"block {frame.index} of group {frame.group} is not open under this lease")
        remaining -= FRAME_BYTES + frame.length
        if frame.length != grant.length:
            raise BodyMismatch(f"block {frame.index} announces {frame.length} bytes where {grant.length} are due")
        if remaining < 0:
            raise BodyMismatch(f"block {frame.index} announces more bytes than the rest of the body has")
        slot, at = np.frombuffer(_memory(context.engine, grant), np.uint8), 0
        async for chunk in _chunks(request.content, frame.length):
            # While the body arrives the lease may end and the slot become another block's. Between this look and the
            # copy nothing else runs.
            if not writer.holds(tenant, lease, grant):
                raise LeaseLost(
                    "the lease ended before its blocks had arrived", remedy="reserve again, with a longer ttl_s"
                )
            slot[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
            at += len(chunk)
        written.append(Written(frame.index, frame.group, frame.length, frame.checksum))
    accepted = await context.in_thread(writer.commit, tenant, lease, written)
    return context.answer(request, {"accepted": accepted})


def _chosen(refs: tuple[BlockRef, ...], wanted: Sequence[tuple[int, int]] | None) -> tuple[BlockRef, ...]:
    if wanted is None:
        return refs
    known = {(ref.index, ref.group): ref for ref in refs}
    try:
        return tuple(known.pop(where) for where in wanted)
    except KeyError as error:
        raise InvalidRequest(
            f"block {error.args[0]} is not part of this lease, or named twice",
            remedy="name blocks the acquire answered",
        ) from None


def _pieces(refs: Sequence[BlockRef], views: Sequence[memoryview]) -> Iterator[list[bytes | memoryview]]:
    """Cut the frames of blocks into pieces of `_PIECE` bytes or a little more."""
    parts: list[bytes | memoryview] = []
    size = 0
    for ref, view in zip(refs, views, strict=True):
        parts.append(pack_frame(Frame(ref.index, ref.group, ref.length, ref.checksum)))
        for start in range(0, ref.length, _PIECE):
            part = view[start : start + _PIECE]
            parts.append(part)
            size += len(part)
            if size >= _PIECE:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts


def _memory(engine: Engine, block: BlockRef | Grant) -> memoryview:
    tier = next(m.tier for m in engine.placement.memory if m.tier.name == block.tier)
    if not tier.addressable:
        raise InvalidRequest(
            f"block {block.index} lies on a GPU", remedy="name that tier in `tiers` only to read its blocks there"
        )
    return tier.view(Slot(block.offset, block.length), block.length)


async def _chunks(stream: StreamReader, size: int) -> AsyncIterator[bytes]:
    """Yield the next `size` bytes of a body as they arrive."""
    while size:
        chunk = await stream.read(min(_CHUNK, size))
        if not chunk:
            raise BodyMismatch(
                "the body ended before the announced bytes had arrived",
                remedy="nothing of it was published; send it again",
            )
        size -= len(chunk)
        yield chunk


ROUTES = [web.post("/v1/{ns}/blocks:get", get), web.post("/v1/{ns}/blocks:put", put)]
