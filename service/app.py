"""The HTTP application: routes, what guards them, and problem documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import http_exceptions, web

from tierkv.errors import BlockTooLarge, BodyMismatch, InvalidRequest, NotFound, TierKVError
from tierkv.service.catalog import refuse_unknown_parameters
from tierkv.service.connections import RETRY_AFTER_S
from tierkv.service.context import CONTEXT, MESSAGE_BYTES, Context
from tierkv.service.guard import admit, guard
from tierkv.service.limits import count_answer
from tierkv.service.logs import begin_request, name_request, route_of
from tierkv.service.routes import ROUTES
from tierkv.wire import PROBLEM_TYPE, problem_from_error

__all__ = ["make_app"]

log = logging.getLogger(__name__)

_PATH_SHOWN = 200
_KEPT_HEADERS = ("Allow", "Content-Range")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(context: Context) -> web.Application:
    """Build the application around a context. The caller owns the engine."""
    middlewares = (_problems, guard, admit, refuse_unknown_parameters)
    app = web.Application(middlewares=middlewares, client_max_size=MESSAGE_BYTES)
    app[CONTEXT] = context
    app.on_response_prepare.extend((begin_request, count_answer))
    app.add_routes(ROUTES)
    return app


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a problem document (RFC 9457)."""
    headers: dict[str, str] = {}
    name_request(request)
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
        headers = {name: error.headers[name] for name in _KEPT_HEADERS if name in error.headers}
    except (http_exceptions.HttpProcessingError, web.PayloadAccessError, ConnectionError):
        failure = BodyMismatch("the body is not what its headers announced, or the connection ended in it")
    except Exception:
        log.exception("request failed unexpectedly", extra={"route": route_of(request)})
        failure = TierKVError("the daemon failed unexpectedly", remedy="its log has the details; please report them")
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if failure.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if failure.status >= 500:
        about = {"route": route_of(request), "status": failure.status, "problem": failure.slug, "detail": str(failure)}
        log.warning("request failed", extra=about)
    document = json.dumps(problem_from_error(failure)).encode()
    return web.Response(body=document, status=failure.status, content_type=PROBLEM_TYPE, headers=headers)
