"""Requests behind a circuit breaker, and calls that end in time and come to nothing instead of raising."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tierkv.client.breaker import Breaker
from tierkv.client.transport import Transport
from tierkv.errors import InvalidRequest, TierKVError, Unavailable
from tierkv.wire import MSGPACK_TYPE

__all__ = ["Calls", "GuardedTransport", "check_seconds"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedTransport(Transport):
    """A `Transport` that does not ask a daemon which has just failed, but probes it now and then.

    Parameters
    ----------
    url, tenant, timeout_s, token, ca
        As for `Transport`.
    probe_s
        Longest time a probe takes, in seconds.
    """

    def __init__(
        self,
        url: str,
        tenant: str | None,
        timeout_s: float,
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        probe_s: float,
    ) -> None:
        super().__init__(url, tenant, timeout_s, token=token, ca=ca)
        self.breaker = Breaker(f"the daemon at {self.url}")
        self._probe_s = probe_s

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
        if time.monotonic() >= self.bound:
            raise Unavailable("there is no time left to ask the daemon")  # says nothing about the daemon
        if self.breaker.must_probe():
            with (
                self.breaker.probing(),
                self.until(time.monotonic() + self._probe_s),
                super().request("GET", "/healthz", [], MSGPACK_TYPE) as response,
            ):
                response.read()
        with (
            self.breaker.asking(),
            super().request(method, path, body, content_type, extra_s=extra_s, once=once) as response,
        ):
            yield response


class Calls:
    """Makes calls over a guarded transport that end within `extra_s` seconds of what they wait for, and never raise."""

    def __init__(self, transport: GuardedTransport, extra_s: float) -> None:
        self._transport = transport
        self._extra_s = extra_s
        self._told: set[type[Exception]] = set()

    def deadline(self, wait_s: float = 0.0) -> float:
        """Return when a call that begins now and waits so long has to be over (monotonic)."""
        return time.monotonic() + wait_s + self._extra_s

    def make(self, work: Callable[[], T], instead: T, *, wait_s: float = 0.0) -> T:
        """Return what `work` returns, or `instead` if it fails, for whatever reason."""
        return self.make_until(self.deadline(wait_s), work, instead)

    def make_until(self, deadline: float, work: Callable[[], T], instead: T) -> T:
        """As `make`, with a deadline of its own."""
        try:
            with self._transport.until(deadline):
                return work()
        except Exception as error:
            self.missed(error)
            return instead

    def missed(self, error: Exception) -> None:
        """Count a failure; tell the log about the first of each kind, except those the breaker tells about."""
        self._transport.breaker.missed(error)
        if isinstance(error, Unavailable) or type(error) in self._told:
            return
        self._told.add(type(error))
        unexpected = not isinstance(error, TierKVError)
        log.warning("taken for a miss, as all of its kind from now on: %s", error, exc_info=unexpected)


def check_seconds(name: str, seconds: float, *, zero: bool = True) -> None:
    """Raise `InvalidRequest` for a time that nobody can mean."""
    if not (seconds >= 0 if zero else seconds > 0):
        raise InvalidRequest(f"{name} cannot be {seconds} seconds", remedy="use a number of seconds from 0 on")
