"""What every route needs: the engine, the configuration, threads for work on bytes, and who is asking."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from tierkv.config import Config
from tierkv.core.engine import Engine
from tierkv.core.state import NamespaceInfo
from tierkv.core.tenants import Tenant
from tierkv.errors import NotFound, Unavailable
from tierkv.insight.live import Insight
from tierkv.insight.traces.recorder import Recorder
from tierkv.service.auth import CALLER, Authority, Caller
from tierkv.service.cluster.peers import Peers
from tierkv.service.connections import Connections
from tierkv.service.limits import Admission
from tierkv.wire import GENERATION_HEADER, JSON_TYPE, MSGPACK_TYPE, decode, encode

__all__ = ["CONTEXT", "MESSAGE_BYTES", "Context", "Requests"]

T = TypeVar("T")
MESSAGE_BYTES = 8 << 20


class Requests:
    """The requests being served, so that the daemon can wait for the last one before it closes.

    aiohttp waits too, but from then on it throws away what still arrives of their bodies.

    Attributes
    ----------
    closing
        Set when no more requests are taken: those that would go on for ever end.
    """

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self.closing = asyncio.Event()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request while it is served. Raises `Unavailable` for one that comes when the daemon is closing."""
        if self.closing.is_set():
            raise Unavailable("the daemon is closing", remedy="ask again when it has been started again")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for those being served, at most `timeout_s` seconds."""
        self.closing.set()
        if self._count:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)


@dataclass(slots=True)
class Context:
    """Shared by all requests of one daemon.

    Attributes
    ----------
    generation
        Random name of this run of the daemon: a client that sees another one attaches anew.
    recorder
        Records requests for whoever follows them.
    insight
        Looks into requests, unless that is switched off.
    threads
        Where bytes are hashed and stores are written, so that the event loop never waits for them.
    """

    config: Config
    engine: Engine
    authority: Authority
    connections: Connections
    peers: Peers
    recorder: Recorder
    insight: Insight | None = None
    admission: Admission = field(default_factory=Admission)
    requests: Requests = field(default_factory=Requests)
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="tierkv-http"))

    def caller(self, request: web.Request) -> Caller:
        """Return whom a request is from; not for routes that need no token."""
        found: Caller = request[CALLER]
        return found

    def tenant(self, request: web.Request) -> Tenant:
        """Return the tenant a request speaks for. Raises `LimitExceeded` for one too many."""
        return self.engine.tenant(self.caller(request).tenant)

    def namespace(self, request: web.Request) -> NamespaceInfo:
        """Return the namespace in a request's path or raise `NotFound`."""
        try:
            return self.engine.namespace(request.match_info["ns"])
        except NotFound as error:
            raise NotFound(error.message, remedy="PUT its spec to /v1/namespaces first") from None

    def audience(self, request: web.Request) -> Tenant | None:
        """Return the tenant whose events and blocks a request may be shown; None: everybody's."""
        return None if self.caller(request).role == "operator" else self.tenant(request)

    def stats(self) -> dict[str, Any]:
        """Return the engine's stats, the generation they are of, and what the daemon itself counts."""
        refused = {**self.admission.refused, "connections": self.connections.refused}
        http = {
            "connections": len(self.connections),
            "requests": self.admission.requests,
            "in_flight_bytes": self.admission.in_flight,
            "refused": {limit: count for limit, count in refused.items() if count},
            "cut": dict(self.connections.cut),
        }
        insight = self.insight.summary() if self.insight is not None else None
        return {"generation": self.generation, **self.engine.stats(), "insight": insight, "http": http}

    def stats_for(self, request: web.Request) -> dict[str, Any]:
        """Return the stats that a request may be shown: of the tenants only its own, unless it is an operator's."""
        report, caller = self.stats(), self.caller(request)
        if caller.role != "operator":
            report["tenants"] = {name: found for name, found in report["tenants"].items() if name == caller.tenant}
        return report

    def unready(self) -> list[str]:
        """Return why the daemon should get no new work, if there is a reason."""
        refusal = self.engine.cold_refusal
        return [f"the cold tier refuses blocks: {refusal}"] if refusal else []

    async def message(self, request: web.Request) -> Any:
        """Read and decode a control message. Raises `InvalidRequest`, or aiohttp's error for one that is too large."""
        return decode(await request.read(), request.content_type)

    def answer(self, request: web.Request, message: Any, *, status: int = 200) -> web.Response:
        """Encode a control message the way the caller wants it."""
        kind = MSGPACK_TYPE if MSGPACK_TYPE in request.headers.get("Accept", "") else JSON_TYPE
        return web.Response(body=encode(message, kind), status=status, content_type=kind, headers=self.headers())

    def headers(self) -> dict[str, str]:
        return {GENERATION_HEADER: self.generation}

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work on the daemon's threads."""
        here = contextvars.copy_context()  # log lines of the work belong to this request
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(here.run, work, *args))


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
