"""What each route takes and answers: the OpenAPI document and the refusal of unknown query parameters stand on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from tierkv.errors import InvalidRequest
from tierkv.service import answers, messages
from tierkv.service.cluster.signing import NODE_HEADER, NODE_PATTERN
from tierkv.service.query import DAY_PATTERN, HASH_PATTERN, NUMBER_PATTERN, SECONDS_PATTERN, WHOLE_PATTERN
from tierkv.wire import CHECKSUM_HEADER, FRAME_TYPE, HIT_HEADER, MISS_HEADER, PAYLOAD_TYPE, TIER_HEADER

__all__ = ["OPERATIONS", "Operation", "Parameter", "refuse_unknown_parameters"]

Answer = type[BaseModel] | str | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a request header, which are text: its description, and the pattern it matches."""

    description: str
    pattern: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A route.

    Attributes
    ----------
    takes
        Body of requests: a message, or a content type; None: there is none.
    answers
        Body of the answer by status: a message, or a content type.
    problems
        Statuses of problems, beside `ALWAYS` and those that follow from the other fields.
    query, headers
        Parameters by name.
    sends
        Headers that every good answer has, beside `Tierkv-Generation`.
    by_tenant
        The answer depends on who asks.
    """

    summary: str
    answers: Mapping[int, Answer]
    takes: Answer = None
    problems: tuple[int, ...] = ()
    query: Mapping[str, Parameter] = field(default_factory=dict)
    headers: Mapping[str, Parameter] = field(default_factory=dict)
    sends: tuple[str, ...] = ()
    by_tenant: bool = False


def _about_chain(summary: str, takes: type[BaseModel], answer: Answer, **more: Any) -> Operation:
    return Operation(summary, {more.pop("status", 200): answer}, takes, by_tenant=True, **more)


def _about_lease(summary: str, takes: Answer, answer: Answer, *problems: int) -> Operation:
    return Operation(summary, {200: answer}, takes, problems=(410, *problems), by_tenant=True)


_GROUP = {"group": Parameter("KV group of the block, 0 by default", WHOLE_PATTERN)}
_WAIT = {"wait_s": Parameter("longest wait for a load in seconds, 10 by default", SECONDS_PATTERN)}
_UNCHANGED = {"If-None-Match": Parameter("tags of what the caller has: then 304")}
_BLOCK: Mapping[int, Answer] = {200: PAYLOAD_TYPE, 304: None}
_BLOCK_HEADERS = ("ETag", "Accept-Ranges", TIER_HEADER)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("PUT", "/v1/namespaces"): Operation(
        "Register a namespace", {200: answers.Namespace}, messages.SpecMessage, problems=(409, 429)
    ),
    ("GET", "/v1/namespaces"): Operation("List the registered namespaces", {200: answers.Namespaces}),
    ("DELETE", "/v1/namespaces/{ns}"): Operation(
        "Unpublish the tenant's blocks of a namespace", {200: answers.Removed}, by_tenant=True
    ),
    ("POST", "/v1/{ns}/lookup"): _about_chain("Find the published prefix", messages.LookupRequest, answers.Hit),
    ("POST", "/v1/{ns}/where"): _about_chain(
        "Find which nodes hold how much of a prefix", messages.WhereRequest, answers.Where
    ),
    ("POST", "/v1/peer/lookup"): Operation(
        "Answer another node's question what is here",
        {200: answers.PeerHit},
        messages.PeerRequest,
        problems=(404,),
        headers={NODE_HEADER: Parameter("signature of the asking node", NODE_PATTERN)},
    ),
    ("POST", "/v1/{ns}/touch"): _about_chain("Report reads in place", messages.TouchRequest, answers.Done),
    ("POST", "/v1/{ns}/prefetch"): _about_chain(
        "Start loading the published prefix", messages.PrefetchRequest, answers.Ticket, status=202
    ),
    ("POST", "/v1/{ns}/acquire"): _about_chain(
        "Pin the published prefix in memory", messages.AcquireRequest, answers.Acquired, sends=(HIT_HEADER, MISS_HEADER)
    ),
    ("POST", "/v1/{ns}/reserve"): _about_chain(
        "Ask for room for blocks to be written", messages.ReserveRequest, answers.Reserved
    ),
    ("POST", "/v1/{ns}/pin"): _about_chain("Keep a prefix in memory", messages.PinRequest, answers.Pinned),
    ("POST", "/v1/{ns}/breakpoints"): _about_chain(
        "Keep prefixes in memory for a while after each use", messages.BreakpointsRequest, answers.Breakpoints
    ),
    ("POST", "/v1/{ns}/unpin"): _about_chain("End a pin", messages.ChainRequest, answers.Unpinned),
    ("GET", "/v1/tickets/{id}"): Operation("Progress of a prefetch", {200: answers.Progress}, by_tenant=True),
    ("POST", "/v1/tickets/{id}/wait"): Operation(
        "Wait for a prefetch", {200: answers.Progress}, messages.WaitRequest, by_tenant=True
    ),
    ("DELETE", "/v1/tickets/{id}"): Operation("Cancel a prefetch", {200: answers.Done}, by_tenant=True),
    ("POST", "/v1/leases/{id}/commit"): _about_lease(
        "Publish blocks written in place", messages.CommitRequest, answers.Accepted, 422
    ),
    ("POST", "/v1/leases/{id}/abort"): _about_lease("End a write lease", None, answers.Done),
    ("POST", "/v1/leases/{id}/release"): _about_lease(
        "End a read or compute lease", messages.ReleaseRequest, answers.Done
    ),
    ("POST", "/v1/leases/{id}/renew"): _about_lease("Extend a lease", messages.RenewRequest, answers.Extended),
    ("POST", "/v1/{ns}/blocks:get"): _about_lease("Read blocks of a lease", messages.BlocksRequest, FRAME_TYPE),
    ("POST", "/v1/{ns}/blocks:put"): Operation(
        "Write and publish blocks of a lease",
        {200: answers.Accepted},
        FRAME_TYPE,
        problems=(410, 422),
        query={"lease": Parameter("lease of the reservation", required=True)},
        by_tenant=True,
    ),
    ("GET", "/v1/{ns}/blocks/{hash}"): Operation(
        "Read one block",
        {**_BLOCK, 206: PAYLOAD_TYPE},
        problems=(416,),
        query={**_GROUP, **_WAIT},
        headers={
            **_UNCHANGED,
            "Range": Parameter("one range of bytes"),
            "If-Range": Parameter("tag of the block that the range is of; of another one all is sent"),
        },
        sends=_BLOCK_HEADERS,
        by_tenant=True,
    ),
    ("HEAD", "/v1/{ns}/blocks/{hash}"): Operation(
        "Look at one block without loading it",
        _BLOCK,
        query=_GROUP,
        headers=_UNCHANGED,
        sends=_BLOCK_HEADERS,
        by_tenant=True,
    ),
    ("PUT", "/v1/{ns}/blocks/{hash}"): Operation(
        "Store one block",
        {200: answers.StoredBlock, 201: answers.StoredBlock},
        PAYLOAD_TYPE,
        problems=(409, 422),
        query={**_GROUP, "parent": Parameter("the block before; absent for the first of a chain", HASH_PATTERN)},
        headers={CHECKSUM_HEADER: Parameter("XXH3-64 of the body, to be verified", "^[0-9a-f]{16}$")},
        sends=("ETag",),
        by_tenant=True,
    ),
    ("DELETE", "/v1/{ns}/blocks/{hash}"): Operation("Unpublish one block", {200: answers.Removed}, by_tenant=True),
    ("POST", "/v1/{ns}/sessions/{id}/end"): Operation(
        "Say that a conversation is over", {200: answers.Ended}, by_tenant=True
    ),
    ("POST", "/v1/{ns}/sessions/{id}/pause"): Operation(
        "Say when a conversation goes on", {200: answers.Held}, messages.PauseRequest, by_tenant=True
    ),
    ("GET", "/v1/attach"): Operation("Where memory is mapped from", {200: answers.Attached}, by_tenant=True),
    ("GET", "/v1/stats"): Operation("Counters and occupancy", {200: answers.Stats}),
    ("POST", "/v1/flush"): Operation("Write everything to the cold tier", {200: answers.Done}, problems=(507,)),
    ("GET", "/v1/segments"): Operation("Segments of the cold tier", {200: answers.Segments}),
    ("GET", "/v1/tenants"): Operation("Tenants and what they use", {200: answers.Tenants}),
    ("GET", "/metrics"): Operation("Metrics for Prometheus", {200: "text/plain"}),
    ("GET", "/healthz"): Operation("Whether requests are taken", {200: answers.Health}),
    ("GET", "/readyz"): Operation("Whether requests can be served", {200: answers.Readiness, 503: answers.Readiness}),
    ("GET", "/openapi.json"): Operation("This document", {200: "application/json"}),
    ("GET", "/v1/events"): Operation(
        "What happens, as it happens",
        {200: "text/event-stream"},
        query={
            "after": Parameter("id of the last event that the reader has"),
            "last": Parameter("begin with so many events of the past", WHOLE_PATTERN),
            "kinds": Parameter("only these kinds, separated by commas"),
            "format": Parameter("tierkv or vllm", "^(tierkv|vllm)$"),
            "stats": Parameter("1: the stats too, once per second", WHOLE_PATTERN),
        },
        headers={"Last-Event-ID": Parameter("as `after`")},
        by_tenant=True,
    ),
    ("GET", "/v1/trunks"): Operation(
        "The prefix tree, folded",
        {200: answers.Trunks},
        query={"most": Parameter("how many trunks at most", "^([0-9]{1,4}|10000)$")},
    ),
    ("GET", "/v1/insight"): Operation(
        "Why prompts were not cached",
        {200: answers.Insight},
        query={"window": Parameter("the last so many seconds, at most a day; else since the start", DAY_PATTERN)},
    ),
    ("POST", "/v1/insight/audits"): Operation(
        "Tell what audits found",
        {200: answers.Accepted},
        messages.AuditsRequest,
        problems=(404,),
        by_tenant=True,
    ),
    ("GET", "/v1/trace"): Operation(
        "What was asked for, as salted hashes",
        {200: answers.TracePage},
        query={"after": Parameter("`last` of the answer before; without it nothing but that", NUMBER_PATTERN)},
    ),
    ("GET", "/"): Operation("The dashboard", {200: "text/html"}),
    ("GET", "/page/{part}"): Operation("Parts of the dashboard", {200: "*/*"}),
}
"""By method and path pattern: every route the daemon has. HEAD is answered where GET is."""


@web.middleware
async def refuse_unknown_parameters(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse query parameters that a route has not: a misspelt one must not go unnoticed."""
    resource = request.match_info.route.resource
    if request.query and resource is not None:
        path = resource.canonical
        operation = OPERATIONS.get((request.method, path)) or OPERATIONS.get(("GET", path))
        unknown = sorted(request.query.keys() - (operation.query.keys() if operation is not None else set()))
        if unknown:
            known = ", ".join(operation.query) if operation is not None and operation.query else "there are none"
            raise InvalidRequest(f"unknown parameters: {', '.join(unknown)[:200]}", remedy=f"known: {known}")
    return await handler(request)
