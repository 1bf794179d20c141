"""A reader of the daemon's events: Server-Sent Events by the book, over a socket of its own."""

import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, NamedTuple, Self

from tests.service.daemon import PATIENCE_S


class Told(NamedTuple):
    """One event as it arrived; `id` is the position after it."""

    id: str
    kind: str
    data: Any


class Listener:
    """Follows ``/v1/events``. Leaving its context hangs up."""

    def __init__(self, port: int, query: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.request("GET", f"/v1/events?{query}", headers=dict(headers or {}))
        self.response = self._connection.getresponse()
        self.id = ""

    def __enter__(self) -> Self:
        assert self.response.status == 200, self.response.read()
        return self

    def __exit__(self, *exc: object) -> None:
        self.response.close()
        self._connection.close()

    def next(self) -> Told | None:
        """Wait for the next event; None when the stream has ended."""
        kind, data = "", []
        while line := self.take_line():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                data.append(value)
            elif line == "\n" and data:
                return Told(self.id, kind, json.loads("\n".join(data)))
        return None

    def take_line(self) -> str:
        """Read a line, noting the position if it tells it; empty when the stream has ended."""
        line = self.response.readline().decode()
        if line.startswith("id: "):
            self.id = line[4:].rstrip("\n")
        return line

    def until(self, wanted: Callable[[Told], bool]) -> list[Told]:
        """Collect events up to and with the first that is `wanted`."""
        found: list[Told] = []
        while not found or not wanted(found[-1]):
            told = self.next()
            assert told is not None, "the stream has ended"
            found.append(told)
        return found


def listen(port: int, query: str, wanted: Callable[[Told], bool]) -> list[Told]:
    """Read events up to and with the first that is `wanted`."""
    with Listener(port, query) as listener:
        return listener.until(wanted)


def position(port: int) -> str:
    """Return the id of the latest event."""
    with Listener(port) as listener:
        while not listener.id:
            listener.take_line()
        return listener.id


def refused(port: int, query: str) -> tuple[int, Any]:
    """Return the status and problem of a request for events that is turned down."""
    listener = Listener(port, query)
    with closing(listener.response):
        return listener.response.status, json.loads(listener.response.read())
