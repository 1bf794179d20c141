"""HTTP/1.1 over a Unix socket or TCP, with connections kept and reused by any thread."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from tierkv.client.timed import TimedSocket, timeout_by
from tierkv.errors import InvalidRequest, TierKVError, Unavailable
from tierkv.wire import (
    GENERATION_HEADER,
    MSGPACK_TYPE,
    TENANT_HEADER,
    check_tenant,
    decode,
    encode,
    error_from_problem,
)

__all__ = ["Answer", "Transport"]

_IDLE_LIMIT = 16
_IDLE_S = 30.0
"""Connections idle for longer are not used again: well below the daemon's keep-alive timeout, so that a request never
meets a connection the daemon is closing at that moment."""
_PROBLEM_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}
_LONGEST_S = 7 * 86400.0


class _Bounds(threading.local):
    """Deadline of what the calling thread asks now."""

    deadline = math.inf


@dataclass(frozen=True, slots=True)
class _Times:
    """Monotonic deadlines of an exchange: for the answer's head, for all of it, and the longest pause in its body."""

    head: float
    whole: float
    pause_s: float


class Answer(dict[str, Any]):
    """A decoded answer, and the run of the daemon (its generation) that gave it. A missing field is `Unavailable`."""

    def __init__(self, fields: Mapping[str, Any], generation: str) -> None:
        super().__init__(fields)
        self.generation = generation

    def __missing__(self, key: str) -> Any:
        raise Unavailable(f"the daemon's answer has no {key!r}", remedy="install the same tierkv version on both sides")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A connect that does not block fails at once when the daemon's queue is full; one with a send timeout waits.
        seconds, fraction = divmod(self.timeout or 0.0, 1)
        self.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), max(1, int(fraction * 1e6)))
        )
        try:
            self.sock.connect(self._path)
        except BlockingIOError:
            raise TimeoutError from None


class _TcpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _TlsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Transport:
    """Sends requests to one daemon. Safe to use from any thread; a forked child opens connections of its own.

    A request whose connection breaks is sent again only on a new connection, and only if doing it twice does no harm.

    Parameters
    ----------
    url
        ``unix:///path/to/socket``, ``http://host:port`` or ``https://host:port``.
    tenant
        Name sent with every request; None: the token's, or ``default``.
    timeout_s
        Longest wait for the daemon beyond what a request itself asks for, in seconds; between parts of a body, the
        longest time without progress.
    token, ca
        As in `tierkv.connect`.
    """

    def __init__(
        self,
        url: str,
        tenant: str | None,
        timeout_s: float,
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 < timeout_s <= _LONGEST_S:
            raise InvalidRequest(
                f"a timeout of {timeout_s} seconds is not possible", remedy="use some seconds, like 5.0"
            )
        self.url = url
        self.local = url.startswith("unix://")
        self._path, self._host, self._port = _parse(url)
        self._encryption = _encryption(url, ca)
        self._sender = _sender(tenant, token)
        self._timeout_s = timeout_s
        self._closed = False
        # No lock: appending and popping are atomic, and a lock held in another thread at a fork would stay so for ever.
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._pid = os.getpid()
        self._bounds = _Bounds()

    @property
    def bound(self) -> float:
        """Deadline that `until` has set for this thread; infinity for none."""
        return self._bounds.deadline

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """End what this thread asks inside by `deadline` (monotonic), however slowly the other side sends."""
        outer = self._bounds.deadline
        self._bounds.deadline = min(outer, deadline)
        try:
            yield
        finally:
            self._bounds.deadline = outer

    def call(
        self, method: str, path: str, message: object = None, *, extra_s: float = 0.0, once: bool = False
    ) -> Answer:
        """Send a control message and return the answer.

        Parameters
        ----------
        extra_s
            Added to the timeout: the waiting that the request asks the daemon for, in seconds.
        once
            Never send it twice: its effect adds up.

        Raises the error the daemon answered with, or `Unavailable`. Blocks.
        """
        body = b"" if message is None else encode(message, MSGPACK_TYPE)
        with self.request(method, path, [body], MSGPACK_TYPE, extra_s=extra_s, once=once) as response:
            body = response.read()
            answer = None
            if response.headers.get_content_type() == MSGPACK_TYPE:
                with contextlib.suppress(InvalidRequest):
                    answer = decode(body, MSGPACK_TYPE)
            if not isinstance(answer, dict):
                raise self._unavailable("what answers there is no tierkv daemon")
        return Answer(answer, response.headers.get(GENERATION_HEADER, ""))

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        path: str,
        body: Iterable[bytes | memoryview],
        content_type: str,
        *,
        extra_s: float = 0.0,
        once: bool = False,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a body and yield the successful response; the connection is kept if that was read whole."""
        if self._closed:
            raise Unavailable("this client is closed", remedy="connect again")
        parts = [part for part in body if part]
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(sum(map(len, parts))),
            "Accept": MSGPACK_TYPE,
            **self._sender,
        }
        bound = self.bound
        head = min(bound, time.monotonic() + self._timeout_s + min(extra_s, _LONGEST_S))
        times = _Times(head, bound, self._timeout_s)
        connection, response = self._exchange(method, path, headers, parts, times, once)
        try:
            if response.status >= 400:
                raise error_from_problem(response.status, response.read(_PROBLEM_BYTES))
            yield response
        except TierKVError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error
        finally:
            # Read to its end and not cut short; otherwise the next answer would begin in the middle of this one.
            if response.isclosed() and not response.length and not response.will_close:
                self._give_back(connection)
            else:
                connection.close()
                response.close()

    def close(self) -> None:
        """Close idle connections and refuse further requests. Idempotent."""
        self._closed = True
        self._drop_idle()

    def _exchange(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        parts: list[bytes | memoryview],
        times: _Times,
        once: bool,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            connection, reused = self._take()
            try:
                return connection, _send(connection, method, path, headers, parts, times)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not (reused and not once and isinstance(error, ConnectionError)):
                    raise self._unavailable(error) from error
            except BaseException:
                connection.close()
                raise

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        if self._pid != os.getpid():
            self._idle, self._pid = [], os.getpid()
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                break
            if time.monotonic() - since < _IDLE_S and _is_open(connection.sock):
                return connection, True
            connection.close()
        if self.local:
            return _UnixConnection(self._path), False
        if self._encryption is not None:
            return _TlsConnection(self._host, self._port, context=self._encryption), False
        return _TcpConnection(self._host, self._port), False

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        if len(self._idle) >= _IDLE_LIMIT:
            connection.close()
            return
        self._idle.append((connection, time.monotonic()))
        if self._closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return
            connection.close()

    def _unavailable(self, error: Exception | str) -> Unavailable:
        if isinstance(error, TimeoutError):
            reason = "it did not answer in time"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        else:
            reason = str(error) or type(error).__name__
        return Unavailable(
            f"the daemon at {self.url} cannot be reached: {reason}", remedy="is tierkv serve running there?"
        )


def _parse(url: str) -> tuple[str, str, int]:
    """Split a daemon's address into socket path, host and port."""
    if url.startswith("unix:///"):
        return url.removeprefix("unix://"), "", 0
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        plain = parts.path in ("", "/") and not parts.query and not parts.username
        if parts.scheme in _PORTS and parts.hostname and plain:
            return "", parts.hostname, parts.port or _PORTS[parts.scheme]
    raise InvalidRequest(
        f"{url!r} is not a daemon's address",
        remedy="use unix:///path/to/socket or http://host:port, or https://host:port",
    )


def _encryption(url: str, ca: str | os.PathLike[str] | None) -> ssl.SSLContext | None:
    """Return how to check the daemon's certificate. Raises `InvalidRequest`."""
    if not url.startswith("https://"):
        if ca is None:
            return None
        raise InvalidRequest(
            "a certificate authority is for https only", remedy="use https://host:port, or leave out ca"
        )
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise InvalidRequest(f"{ca} holds no certificates: {error.strerror}", remedy="name a PEM file") from None


def _sender(tenant: str | None, token: str | None) -> dict[str, str]:
    """Return the headers that say who is asking. Raises `InvalidRequest`, which never shows the token."""
    headers = {} if tenant is None else {TENANT_HEADER: check_tenant(tenant)}
    token = (os.environ.get("TIERKV_TOKEN", "") if token is None else token).strip()
    if token:
        if not token.isascii() or not token.isprintable() or " " in token:
            raise InvalidRequest("the token has characters that no token has", remedy="copy it again, as one word")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    parts: list[bytes | memoryview],
    times: _Times,
) -> http.client.HTTPResponse:
    if connection.sock is None:
        connection.timeout = timeout_by(times.head)
        connection.connect()
    sock = _timed(connection)
    sock.bound(times.head, math.inf)
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    refused = False
    try:
        with sock.together():
            connection.endheaders()
            for part in parts:
                connection.send(part)
    except (BrokenPipeError, ConnectionResetError):
        # The daemon hung up before it had read all: it may have said why.
        refused = True
    response = connection.getresponse()
    sock.bound(times.whole, times.pause_s)
    response.will_close |= refused
    return response


def _timed(connection: http.client.HTTPConnection) -> TimedSocket:
    """Return the bounded socket of an open connection, put there the first time."""
    sock: Any = connection.sock
    if isinstance(sock, TimedSocket):
        return sock
    timed = TimedSocket(sock)
    connection.sock = cast(Any, timed)
    return timed


def _is_open(sock: socket.socket | None) -> bool:
    """Whether the other end keeps an idle connection: nothing to read, not even its end."""
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)
