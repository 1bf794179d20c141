"""What every route needs: the engine, the configuration, threads for work on bytes, and who is asking."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from tierkv.config import Config
from tierkv.core.engine import Engine
from tierkv.core.state import NamespaceInfo
from tierkv.core.tenants import Tenant
from tierkv.errors import NotFound, Unavailable
from tierkv.wire import GENERATION_HEADER, JSON_TYPE, MSGPACK_TYPE, TENANT_HEADER, check_tenant, decode, encode

__all__ = ["CONTEXT", "MESSAGE_BYTES", "Context", "Requests"]

T = TypeVar("T")
MESSAGE_BYTES = 8 << 20


class Requests:
    """The requests being served, so that the daemon can wait for the last one before it closes.

    aiohttp waits too, but from then on it throws away what still arrives of their bodies.
    """

    def __init__(self) -> None:
        self._count = 0
        self._closing = False
        self._idle = asyncio.Event()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request while it is served. Raises `Unavailable` for one that comes when the daemon is closing."""
        if self._closing:
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
        self._closing = True
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
    threads
        Where bytes are hashed and stores are written, so that the event loop never waits for them.
    """

    config: Config
    engine: Engine
    requests: Requests = field(default_factory=Requests)
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="tierkv-http"))

    def tenant(self, request: web.Request) -> Tenant:
        """Return the tenant a request speaks for. Raises `InvalidRequest` for a name that cannot be one."""
        return self.engine.tenant(check_tenant(request.headers.get(TENANT_HEADER, "default")))

    def namespace(self, request: web.Request) -> NamespaceInfo:
        """Return the namespace in a request's path or raise `NotFound`."""
        try:
            return self.engine.namespace(request.match_info["ns"])
        except NotFound as error:
            raise NotFound(error.message, remedy="PUT its spec to /v1/namespaces first") from None

    def stats(self) -> dict[str, Any]:
        """Return the engine's stats and the generation they are of."""
        return {"generation": self.generation, **self.engine.stats()}

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
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
