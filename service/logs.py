"""Logs: one line for each event, logfmt or JSON, on standard error; and an id that joins the lines of a request.

What an event is about goes into `extra`, not into the message: both formats write it as fields. Nothing that a request
carries is logged but its id: no tokens, hashes, keys, lease ids, tenant names or payload.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from datetime import UTC, datetime

from aiohttp import web

from tierkv.config import LogConfig

__all__ = ["ASKED_WAIT_S", "REQUEST_ID_HEADER", "begin_request", "configure_logs", "name_request", "route_of"]

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
ASKED_WAIT_S = "asked_wait_s"
"""Where a handler notes on its request how long the caller wanted it to wait, in seconds."""
SLOW_S = 1.0

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_BEGUN = "begun_s"
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure_logs(config: LogConfig) -> None:
    """Send the logs of this process to standard error in the format and from the level on that `config` names."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if config.format == "json" else _Logfmt())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)


def name_request(request: web.Request) -> None:
    """Give a request the id its caller sent, or a new one, for every line logged in its course."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    _request_id.set(given if _SANE_ID.fullmatch(given) else secrets.token_hex(8))
    request[_BEGUN] = time.monotonic()


async def begin_request(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for `on_response_prepare`: answer the request's id, and log an answer that took too long to begin.

    Too long is a second more than the caller asked to wait.
    """
    if _BEGUN not in request:
        return
    response.headers[REQUEST_ID_HEADER] = _request_id.get()
    took_s = time.monotonic() - request[_BEGUN]
    asked_s = request.get(ASKED_WAIT_S, 0.0)
    if took_s - asked_s > SLOW_S:
        log.warning(
            "slow request",
            extra={
                "route": route_of(request),
                "status": response.status,
                "took_s": round(took_s, 3),
                "asked_wait_s": asked_s,
                "body_bytes": request.content_length or 0,
            },
        )


def route_of(request: web.Request) -> str:
    """Name a request by its route: paths hold lease ids and hashes, which no log should."""
    resource = request.match_info.route.resource
    return f"{request.method} {resource.canonical if resource is not None else 'unknown route'}"


class _Logfmt(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_quoted(value)}" for name, value in _fields(self, record).items())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(self, record), default=str)


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, object]:
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields: dict[str, object] = {
        "time": moment,
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    if request_id := _request_id.get():
        fields["request"] = request_id
    fields |= {name: value for name, value in record.__dict__.items() if name not in _OWN}
    if record.exc_info:
        fields["traceback"] = formatter.formatException(record.exc_info)
    return fields


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
