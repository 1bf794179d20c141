"""HTTP/1.1 over a Unix socket or TCP, with connections kept and reused by any thread."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

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
_LONGEST_S = 7 * 86400.0


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


class Transport:
    """Sends requests to one daemon. Safe to use from any thread; a forked child opens connections of its own.

    A request whose connection breaks is sent again only on a new connection, and only if doing it twice does no harm.

    Parameters
    ----------
    url
        ``unix:///path/to/socket`` or ``http://host:port``.
    tenant
        Name sent with every request.
    timeout_s
        Longest wait for the daemon beyond what a request itself asks for, in seconds; between parts of a body, the
        longest time without progress.
    """

    def __init__(self, url: str, tenant: str, timeout_s: float) -> None:
        if not 0 < timeout_s <= _LONGEST_S:
            raise InvalidRequest(
                f"a timeout of {timeout_s} seconds is not possible", remedy="use some seconds, like 5.0"
            )
        self.url = url
        self.local = url.startswith("unix://")
        self._path, self._host, self._port = _parse(url)
        self._tenant = check_tenant(tenant)
        self._timeout_s = timeout_s
        self._closed = False
        # No lock: appending and popping are atomic, and a lock held in another thread at a fork would stay so for ever.
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._pid = os.getpid()

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
            TENANT_HEADER: self._tenant,
        }
        deadline = time.monotonic() + self._timeout_s + min(extra_s, _LONGEST_S)
        connection, response = self._exchange(method, path, headers, parts, deadline, once)
        try:
            if connection.sock is not None:
                connection.sock.settimeout(self._timeout_s)
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
        deadline: float,
        once: bool,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            connection, reused = self._take()
            try:
                return connection, _send(connection, method, path, headers, parts, deadline)
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
        if parts.scheme == "http" and parts.hostname and parts.path in ("", "/") and not parts.query:
            return "", parts.hostname, parts.port or 80
    raise InvalidRequest(f"{url!r} is not a daemon's address", remedy="use unix:///path/to/socket or http://host:port")


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    parts: list[bytes | memoryview],
    deadline: float,
) -> http.client.HTTPResponse:
    if connection.sock is None:
        connection.timeout = _remaining(deadline)
        connection.connect()
    sock: socket.socket = connection.sock
    sock.settimeout(_remaining(deadline))
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    refused = False
    try:
        connection.endheaders()
        for part in parts:
            sock.settimeout(_remaining(deadline))
            connection.send(part)
    except (BrokenPipeError, ConnectionResetError):
        # The daemon hung up before it had read all: it may have said why.
        refused = True
    sock.settimeout(_remaining(deadline))
    response = connection.getresponse()
    response.will_close |= refused
    return response


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _is_open(sock: socket.socket | None) -> bool:
    """Whether the other end keeps an idle connection: nothing to read, not even its end."""
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)
