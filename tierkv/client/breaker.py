"""A client's circuit breaker: after a few failures in a row the daemon is not asked, but for a probe now and then.

When it opens and closes is `tierkv.storage.breaker`'s; here are the threads and forks of a client, and what it counts.
Before the first request after a failure one thread probes, as that costs less than a request which is not answered. A
probe that succeeds closes the breaker, but the next failure opens it again, for twice as long: the time between probes
starts over only when a request has succeeded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from tierkv.errors import TierKVError, Unavailable
from tierkv.storage import breaker
from tierkv.storage.breaker import BreakerState

__all__ = ["Breaker", "Health"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """How the daemon has been doing, as seen by one client in this process.

    Attributes
    ----------
    state
        Whether it is asked at the moment, see `tierkv.client.breaker`.
    failures
        Requests and probes that it did not answer, or not in time, or with nonsense.
    short_cut
        Requests that were not made because it had failed before.
    misses
        Calls of any kind that came to nothing: for those two reasons, or because the daemon refused.
    opened
        How often the breaker opened.
    open_s
        Seconds it has been open or half-open, in all.
    last_error
        The latest failure or refusal in words, empty for none.
    """

    state: BreakerState
    failures: int
    short_cut: int
    misses: int
    opened: int
    open_s: float
    last_error: str


class Breaker:
    """Counts failures and decides who may ask. Safe to use from any thread; a forked child begins with a closed one.

    Parameters
    ----------
    name
        Whose requests these are, for errors and the log.
    clock, jitter
        Monotonic seconds, and numbers from 0 to 1 that spread the probes of many clients.
    """

    def __init__(
        self, name: str, *, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._name = name
        self._clock = clock
        self._jitter = jitter
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._switch = breaker.Breaker(clock=self._clock, jitter=self._jitter)
        self._since = 0.0
        self._failures = 0
        self._short_cut = 0
        self._misses = 0
        self._open_s = 0.0
        self._last_error = ""

    def must_probe(self) -> bool:
        """Say whether the caller is the one to probe before it asks. Raises `Unavailable` when nobody may ask."""
        with self._locked():
            if not self._switch.refuses:
                return self._switch.begin()
            self._short_cut += 1
        raise Unavailable(f"{self._name} failed before and is not asked for a while", remedy="see health()")

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Probe inside: leaving without an error closes the breaker."""
        try:
            yield
        except BaseException as error:
            with self._locked():
                self._failures += 1
                self._last_error = _in_words(error)
                self._switch.failed(True)
            raise
        with self._locked():
            self._switch.seems_well()
            self._open_s += self._clock() - self._since
        log.warning("%s answers again", self._name)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Make a request inside. A refusal by the daemon is an answer, not a failure."""
        try:
            yield
        except Exception as error:
            if _is_answer(error):
                self._succeeded()
            else:
                self._failed(error)
            raise
        self._succeeded()

    def missed(self, error: Exception) -> None:
        """Count a call that came to nothing."""
        with self._locked():
            self._misses += 1
            self._last_error = _in_words(error)

    def health(self) -> Health:
        with self._locked():
            since = 0.0 if self._switch.state == "closed" else self._clock() - self._since
            return Health(
                self._switch.state,
                self._failures,
                self._short_cut,
                self._misses,
                self._switch.opened,
                self._open_s + since,
                self._last_error,
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._pid != os.getpid():  # forked: another thread of the parent may have held the lock at that moment
            self._begin()
        with self._lock:
            yield

    def _succeeded(self) -> None:
        with self._locked():
            if self._switch.state == "closed":  # else asked before it opened
                self._switch.succeeded()

    def _failed(self, error: Exception) -> None:
        with self._locked():
            self._failures += 1
            self._last_error = _in_words(error)
            if not self._switch.failed(False):
                return
            self._since = self._clock()
        log.warning("not asking for a while: %s", error)


def _is_answer(error: Exception) -> bool:
    """Whether an error is one that a live daemon sent on purpose."""
    return isinstance(error, TierKVError) and not isinstance(error, Unavailable) and type(error) is not TierKVError


def _in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__
