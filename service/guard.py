"""What a request must pass before its route sees it: the host it names, its token, and the daemon's limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from tierkv.config import Config
from tierkv.errors import Forbidden, InvalidRequest
from tierkv.service.auth import CALLER, NODE_ROUTES, OPEN_ROUTES, may
from tierkv.service.context import CONTEXT, MESSAGE_BYTES, Context
from tierkv.service.limits import ALWAYS_SERVED, LEASING_ROUTES, SHARE

__all__ = ["admit", "guard"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a browser sends for somebody else's page, bodies that would grow when unpacked, strangers, and
    latecomers."""
    context = request.app[CONTEXT]
    context.connections.begin(request)
    try:
        if (request.method, _route(request)) not in NODE_ROUTES:  # nodes have many names, and pages cannot sign
            _check_host(request, context.config)
        _check_origin(request)
        _check_caller(request, context)
        with context.requests.serving():
            return await handler(request)
    finally:
        context.connections.end(request)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request if the daemon's limits allow, and count it until the connection has taken its answer."""
    context = request.app[CONTEXT]
    limits, route = context.config.limits, _route(request)
    if route in ALWAYS_SERVED:
        return await handler(request)
    if route in LEASING_ROUTES:
        context.admission.check_leases(limits, context.engine.held_leases(context.tenant(request)))
    announced = request.content_length
    if announced is None:
        announced = MESSAGE_BYTES if request.can_read_body else 0
    with context.admission.serving(limits, min(announced, limits.body)) as share:
        request[SHARE] = share
        response = await handler(request)
        await response.prepare(request)
        await response.write_eof()
        return response


def _check_host(request: web.Request, config: Config) -> None:
    host = request.headers.get("Host", "")
    if host:  # DNS rebinding
        name = _hostname(f"//{host}")
        if name not in _LOCAL_HOSTS and name != config.host and name not in config.auth.allowed_hosts:
            raise InvalidRequest(
                f"host {host[:100]!r} is not this daemon",
                remedy="address it as localhost or 127.0.0.1, or add the name to auth.allowed_hosts",
            )


def _check_origin(request: web.Request) -> None:
    host = request.headers.get("Host", "")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:  # cross-site request forgery
        raise InvalidRequest("requests of other sites are not served", remedy="call the daemon from outside a browser")
    if "Content-Encoding" in request.headers:
        raise InvalidRequest(
            "encoded bodies are not understood", remedy="send the body as it is, without Content-Encoding"
        )


def _check_caller(request: web.Request, context: Context) -> None:
    """Note on the request whom it is from, if its route cares."""
    route = _route(request)
    method = "GET" if request.method == "HEAD" else request.method
    if (method, route) in OPEN_ROUTES | NODE_ROUTES:
        return
    caller = context.authority.caller(request.headers)
    if route and not may(caller.role, method, route):
        raise Forbidden(f"{method} {route} is not for the role {caller.role}", remedy="use a token of a role that may")
    request[CALLER] = caller


def _route(request: web.Request) -> str:
    """The pattern of the path a request is for; empty if no route is."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
