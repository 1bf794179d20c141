"""`tierkv trace record`: follow a daemon's traffic into a file."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tierkv.client.transport import Transport
from tierkv.errors import Unavailable
from tierkv.insight.traces.export import new_file

__all__ = ["Recorded", "record"]

_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Recorded:
    """How far a recording is.

    Attributes
    ----------
    requests, missed
        Requests in the file, and those that are known to be missing between them.
    gaps
        How many times nobody knows what is missing: the daemon was started anew, or was not asked for too long.
    """

    requests: int = 0
    missed: int = 0
    gaps: int = 0


def record(
    url: str, output: Path, seconds: float | None, stopped: Callable[[], bool], *, interval_s: float = 0.5
) -> Recorded:
    """Write what a daemon is asked from now on to a new file, for so many seconds, or until it is `stopped`.

    A daemon that goes away is waited for. Asks every `interval_s` seconds, and once more at the end. Raises what the
    daemon answers to the first question, and `StorageError` for a file that cannot be made.
    """
    transport = Transport(url, None, _TIMEOUT_S)
    try:
        answer = transport.call("GET", "/v1/trace")
        end = math.inf if seconds is None else time.monotonic() + seconds
        with new_file(output) as file:
            follower = _Follower(transport, file, answer.generation, int(answer["last"]))
            over = False
            while not over:
                time.sleep(max(0.0, min(interval_s, end - time.monotonic())))
                over = stopped() or time.monotonic() >= end
                with contextlib.suppress(Unavailable):
                    while follower.take():
                        pass
            return follower.done
    finally:
        transport.close()


class _Follower:
    """Takes one answer after the other into a file."""

    def __init__(self, transport: Transport, file: BinaryIO, generation: str, after: int) -> None:
        self.done = Recorded()
        self._transport = transport
        self._file = file
        self._generation = generation
        self._after = after

    def take(self) -> bool:
        """Ask for the next requests; say whether there may be more."""
        answer = self._transport.call("GET", f"/v1/trace?after={self._after}")
        if answer.generation != self._generation:
            self._generation, self._after = answer.generation, 0
            self.done.gaps += 1
            return True
        if answer["missed"] is None:
            self.done.gaps += 1
        else:
            self.done.missed += answer["missed"]
        self._after = int(answer["last"])
        for row in answer["rows"]:
            self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self.done.requests += len(answer["rows"])
        return bool(answer["rows"])
