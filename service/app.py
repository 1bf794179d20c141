"""The HTTP application: routes, problem documents, and the guard against foreign hosts."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import http_exceptions, web

from tierkv.errors import BlockTooLarge, BodyMismatch, InvalidRequest, NotFound, TierKVError
from tierkv.service.context import CONTEXT, MESSAGE_BYTES, Context
from tierkv.service.routes import ROUTES
from tierkv.wire import PROBLEM_TYPE, problem_from_error

__all__ = ["make_app"]

log = logging.getLogger(__name__)

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_PATH_SHOWN = 200
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(context: Context) -> web.Application:
    """Build the application around a context. The caller owns the engine."""
    app = web.Application(middlewares=[_problems, _guard], client_max_size=MESSAGE_BYTES)
    app[CONTEXT] = context
    app.add_routes(ROUTES)
    return app


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a browser sends for somebody else's page, bodies that would grow when unpacked, and late comers."""
    host = request.headers.get("Host", "")
    if host and _hostname(f"//{host}") not in _LOCAL_HOSTS:  # DNS rebinding
        raise InvalidRequest(f"host {host[:100]!r} is not this daemon", remedy="address it as localhost or 127.0.0.1")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:  # cross-site request forgery
        raise InvalidRequest("requests of other sites are not served", remedy="call the daemon from outside a browser")
    if "Content-Encoding" in request.headers:
        raise InvalidRequest(
            "encoded bodies are not understood", remedy="send the body as it is, without Content-Encoding"
        )
    with request.app[CONTEXT].requests.serving():
        return await handler(request)


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a problem document (RFC 9457)."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except TierKVError as error:
        failure = error
    except web.HTTPRequestEntityTooLarge:
        failure = BlockTooLarge(f"a control message may have {MESSAGE_BYTES} bytes", remedy="send fewer blocks at once")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = NotFound if error.status == 404 else InvalidRequest
        failure = kind(
            f"{request.method} {request.path[:_PATH_SHOWN]}: {error.reason}", remedy="docs/wire.md lists the routes"
        )
        failure.status = error.status  # type: ignore[misc]
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
    except (http_exceptions.HttpProcessingError, web.PayloadAccessError, ConnectionError):
        failure = BodyMismatch("the body is not what its headers announced, or the connection ended in it")
    except Exception:
        log.exception("%s failed unexpectedly", _route(request))
        failure = TierKVError("the daemon failed unexpectedly", remedy="its log has the details; please report them")
    if failure.status >= 500:
        log.warning("%s: %s", _route(request), failure)
    document = json.dumps(problem_from_error(failure)).encode()
    return web.Response(body=document, status=failure.status, content_type=PROBLEM_TYPE, headers=headers)


def _route(request: web.Request) -> str:
    """Name a request by its route: paths hold lease ids and hashes, which no log should."""
    resource = request.match_info.route.resource
    return f"{request.method} {resource.canonical if resource is not None else 'unknown route'}"
