"""Accepted connections: how many there may be, and which of them get nowhere.

aiohttp waits for ever for the rest of a request and for a reader of its answer. Here a connection that gets nowhere is
cut: it holds memory, and perhaps a lease, for nobody. One that waits for the daemon is left alone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import cast

from aiohttp import web

from tierkv.config import LimitsConfig
from tierkv.errors import Overloaded, TierKVError
from tierkv.wire import PROBLEM_TYPE, problem_from_error

__all__ = ["RETRY_AFTER_S", "Connections"]

RETRY_AFTER_S = 1
"""What a refused client is told to wait."""
_LOOKS = 4
"""How often a connection is looked at before it is cut: as often as this in `limits.idle`."""
_LEAST_BYTES = 64 << 10
"""Less than so many bytes in `limits.idle` is no progress, unless it is the rest."""


class Connections:
    """Makes the protocol of each connection that is accepted, and cuts those that get nowhere.

    Parameters
    ----------
    make
        Makes aiohttp's protocol of a connection; can be replaced for connections to come.
    limits
        Returns the limits of now, of which `connections` and `idle` are looked at; can be replaced.

    Attributes
    ----------
    cut
        Connections cut so far, by what they did not get on with: ``head``, ``body`` or ``answer``.
    refused
        Connections that were one too many.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], limits: Callable[[], LimitsConfig]) -> None:
        self.make = make
        self.limits = limits
        self.cut: Counter[str] = Counter()
        self.refused = 0
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        """Make a protocol: what `create_server` wants."""
        return _Connection(self, self.make())

    def begin(self, request: web.BaseRequest) -> None:
        """Note that a connection has sent the head of this request."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.begin(request)

    def end(self, request: web.BaseRequest) -> None:
        """Note that this request is answered, as far as its connection has taken the answer."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.end()

    def admit(self, connection: _Connection) -> bool:
        if len(self._open) >= self.limits().connections:
            self.refused += 1
            return False
        self._open[connection.inner] = connection
        return True

    def forget(self, connection: _Connection) -> None:
        self._open.pop(connection.inner, None)

    async def watch(self) -> None:
        """Cut connections that get nowhere, until cancelled."""
        while True:
            await asyncio.sleep(self.limits().idle / _LOOKS)
            for connection in list(self._open.values()):
                stuck = connection.look()
                if stuck:
                    self.cut[stuck] += 1
                    connection.abort()


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and notes how the connection gets on.

    Time is counted in looks: when the whole process stood still, nobody is to blame.
    """

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self._connections = connections
        self._admitted = False
        self._transport: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None
        self._in_head = True
        self._arrived = 0
        self._reading = 0
        self._unsent = 0
        self._writing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._admitted = self._connections.admit(self)
        if self._admitted:
            self.inner.connection_made(transport)
        else:
            self._transport.write(_refusal(Overloaded("the daemon has as many connections as it takes")))
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        self._arrived += len(data)
        if self._request is None and not self._in_head:
            self._in_head, self._reading = True, 0
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._admitted else None

    def pause_writing(self) -> None:
        if self._admitted:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._writing = 0
        if self._admitted:
            self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        if self._admitted:
            self.inner.connection_lost(exc)

    def begin(self, request: web.BaseRequest) -> None:
        self._request, self._in_head = request, False
        self._arrived = self._reading = 0

    def end(self) -> None:
        self._request = None

    def look(self) -> str:
        """Return what the connection does not get on with, if anything."""
        assert self._transport is not None
        unsent = self._transport.get_write_buffer_size()
        if unsent and self._writing and unsent > self._unsent - _LEAST_BYTES:
            self._writing += 1
        else:
            self._writing, self._unsent = int(unsent > 0), unsent
        if self._writing > _LOOKS:
            return "answer"
        awaited = self._in_head or (self._request is not None and not self._request.content.is_eof())
        if not awaited:
            self._reading = self._arrived = 0
            return ""
        self._reading += 1
        if self._reading <= _LOOKS:
            return ""
        if self._in_head or self._arrived < _LEAST_BYTES:
            return "head" if self._in_head else "body"
        self._reading = self._arrived = 0
        return ""

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


def _refusal(error: TierKVError) -> bytes:
    """An answer to a request that nobody reads."""
    body = json.dumps(problem_from_error(error)).encode()
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\nContent-Type: {PROBLEM_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
