"""What the daemon takes on at once. More is refused at the door, so that what is inside gets done; nothing queues."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from aiohttp import web

from tierkv.config import LimitsConfig
from tierkv.errors import LimitExceeded, Overloaded

__all__ = ["ALWAYS_SERVED", "LEASING_ROUTES", "SHARE", "Admission", "Share", "count_answer"]

ALWAYS_SERVED = frozenset(
    {"/healthz", "/readyz", "/metrics", "/v1/leases/{id}/release", "/v1/leases/{id}/abort"},
)
"""Routes that are served under any load: they wait for nothing, and tell about the load or make it less."""
LEASING_ROUTES = frozenset({"/v1/{ns}/acquire", "/v1/{ns}/reserve", "/v1/{ns}/pin", "/v1/{ns}/breakpoints"})
SHARE = "tierkv.share"
"""Key of a request's `Share`."""


class Admission:
    """Counts the requests that are served and the bytes of their bodies. Belongs to the event loop.

    Attributes
    ----------
    requests
        Requests being served, those that wait included.
    in_flight
        Bytes of the bodies being received and sent.
    refused
        Requests refused so far, by the limit they were over: ``requests``, ``in_flight`` or ``leases``.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.in_flight = 0
        self.refused: Counter[str] = Counter()

    @contextlib.contextmanager
    def serving(self, limits: LimitsConfig, nbytes: int) -> Iterator[Share]:
        """Count a request and the `nbytes` of its body while it is served. Raises `Overloaded`."""
        if self.requests >= limits.requests:
            self.refused["requests"] += 1
            raise Overloaded(
                "the daemon serves as many requests as it takes", remedy="ask again later, or raise limits.requests"
            )
        share = Share(self, limits)
        self.requests += 1
        try:
            share.take(nbytes)
            yield share
        finally:
            self.requests -= 1
            share.close()

    def check_leases(self, limits: LimitsConfig, held: int) -> None:
        """Raise `LimitExceeded` for a tenant that holds as many leases as it may."""
        if held >= limits.leases:
            self.refused["leases"] += 1
            raise LimitExceeded(f"the tenant holds {held} leases", remedy="release some, or raise limits.leases")


class Share:
    """The bytes in flight of one request."""

    def __init__(self, admission: Admission, limits: LimitsConfig) -> None:
        self._admission = admission
        self._limits = limits
        self._nbytes = 0
        self._closed = False

    def take(self, nbytes: int) -> None:
        """Count `nbytes` more. Raises `Overloaded` when that is too much; something always fits an idle daemon."""
        in_flight = self._admission.in_flight
        if in_flight and in_flight + nbytes > self._limits.in_flight:
            self._admission.refused["in_flight"] += 1
            raise Overloaded(
                "the daemon moves as many bytes as it takes", remedy="ask again later, or raise limits.in_flight"
            )
        self.note(nbytes)

    def note(self, nbytes: int) -> None:
        """Count `nbytes` more that are in memory already."""
        if not self._closed:
            self._nbytes += nbytes
            self._admission.in_flight += nbytes

    def close(self) -> None:
        """Count them no more."""
        self._closed = True
        self._admission.in_flight -= self._nbytes
        self._nbytes = 0


async def count_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Count the body of an answer, before its head is sent. Raises `Overloaded` for a stream that is too much."""
    share: Share | None = request.get(SHARE)
    if share is None or response.content_length is None:
        return
    if isinstance(response, web.Response):
        share.note(response.content_length)
    else:
        share.take(response.content_length)
