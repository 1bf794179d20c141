"""A circuit breaker: after some failures in a row nobody is asked any more, but for one call now and then.

closed      every call is made
open        no call is made
half-open   one call is under way to see how things are; no other is made

Used for the shared tier's engine here, and for the daemon in `tierkv.client`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """Decides who may ask. Changed by one thread, or under a lock; `state` and `refuses` may be read by any thread.

    Parameters
    ----------
    failures_to_open
        Failures in a row after which it opens.
    first_pause_s, longest_pause_s
        How long it stays open at first, and at most: twice as long after each call that was made in vain.
    clock, jitter
        Monotonic seconds, and numbers from 0 to 1 that spread the calls of many nodes.
    """

    def __init__(
        self,
        failures_to_open: int = 3,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 5.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._jitter = jitter
        self._pause_s = first_pause_s
        self._in_a_row = 0
        self._until = 0.0
        self.opened = 0
        self.state: BreakerState = "closed"

    @property
    def refuses(self) -> bool:
        """Whether a call would not be made now."""
        return self.state == "half-open" or (self.state == "open" and self._clock() < self._until)

    def begin(self) -> bool:
        """Note that a call is made, which must not be refused now; say whether it is the one that probes."""
        if self.state == "closed":
            return False
        self.state = "half-open"
        return True

    def succeeded(self) -> None:
        """Note a call that was answered."""
        self.state = "closed"
        self._in_a_row = 0
        self._pause_s = self._first_pause_s

    def seems_well(self) -> None:
        """Note the answer to a probe that was only that, and no call: the first call to fail opens it again at once.

        Pauses go on growing until a call has been answered.
        """
        self.state = "closed"
        self._in_a_row = self._failures_to_open - 1

    def failed(self, probe: bool) -> bool:
        """Note a call that was not answered; `probe` is what `begin` said of it. Say whether that has opened it."""
        if self.state != "closed" and not probe:  # made before it opened
            return False
        self._in_a_row += 1
        if not probe and self._in_a_row < self._failures_to_open:
            return False
        self.opened += not probe
        self.state = "open"
        self._until = self._clock() + self._pause_s * (0.5 + 0.5 * self._jitter())
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return not probe
