"""The observer that records the traffic of a running cache: into files, and for whoever asks over HTTP."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass
from threading import Event as Signal
from threading import Lock, Thread

from tierkv.core.engine import Engine
from tierkv.core.observing import SeenRequest
from tierkv.core.tenants import Tenant
from tierkv.insight.traces.files import TraceFiles
from tierkv.insight.traces.row import Namer, Row

__all__ = ["Page", "Recorder"]

log = logging.getLogger(__name__)

KEPT_S = 60.0
"""For so long after somebody asked, requests are kept for the next question."""
_WAITING_BLOCKS = 1 << 18
_KEPT_BLOCKS = 1 << 18
_KEPT_ROWS = 1 << 15
_PAGE_BLOCKS = 1 << 15
_PAGE_ROWS = 1 << 12
_CHUNK_BYTES = 1 << 20
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Page:
    """The next requests of a recording.

    Attributes
    ----------
    rows
        At most some thousand.
    last
        What to ask with next time.
    missed
        How many requests before `last` are not among those recorded; None: nobody knows.
    """

    rows: list[Row]
    last: int
    missed: int | None


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    tenant: bytes
    row: Row


class Recorder:
    """Records requests while there are files to write to, or somebody who asks. Safe to use from any thread.

    Parameters
    ----------
    engine
        Whose requests; closed after this.
    salt
        What names are hashed with, see `tierkv.insight.traces.row.trace_salt`.
    files
        Where every request is written, from now on; None: nowhere. Closed with the recorder.
    """

    def __init__(self, engine: Engine, salt: bytes, files: TraceFiles | None) -> None:
        self._engine = engine
        self._namer = Namer(salt)
        self._files = files
        self._broken = False
        self._handing_over = Lock()
        self._queue: deque[tuple[int, SeenRequest]] = deque()
        self._queued_blocks = 0
        self._number = 0
        self._wanted_until = 0.0
        self._keeping = Lock()  # for all that follows
        self._kept: deque[_Kept] = deque()
        self._kept_blocks = 0
        self._begun = 0
        self._done = 0
        self._stop = Signal()
        self._thread = Thread(target=self._work, name="tierkv-trace", daemon=True)
        self._thread.start()
        engine.observe(self)

    def acquired(self, seen: SeenRequest) -> None:
        """See `tierkv.core.observing.Observer`. What there is no room for is left out, and numbered all the same."""
        if seen.group or not seen.hashes:
            return  # the first group's request for the same prompt is recorded
        with self._handing_over:
            if self._files is None and time.monotonic() >= self._wanted_until:
                return
            self._number += 1
            if self._queued_blocks < _WAITING_BLOCKS:
                self._queued_blocks += len(seen.hashes)
                self._queue.append((self._number, seen))

    def since(self, after: int | None, tenant: Tenant | None = None) -> Page:
        """Return what was recorded after a number, of one tenant or of all; with None only where the recording is.

        Recording goes on for `KEPT_S` seconds from here, if there are no files. Blocks for some milliseconds.
        """
        with self._handing_over:
            now = time.monotonic()
            lapsed = self._files is None and now >= self._wanted_until
            self._wanted_until = now + KEPT_S
            if lapsed:
                self._number += 1  # stands for all that came meanwhile
            begun = self._number
        self._catch_up()
        with self._keeping:
            if lapsed:
                self._begin_at(begun)
            if after is None or after > self._done:
                return Page([], self._done, 0)
            found: list[_Kept] = []
            blocks = 0
            for kept in self._kept:
                if kept.number <= after:
                    continue
                if len(found) >= _PAGE_ROWS or blocks >= _PAGE_BLOCKS:
                    break
                found.append(kept)
                blocks += len(kept.row.blocks)
            last = found[-1].number if found else self._done
            missed = None if after < self._begun else last - after - len(found)
            return Page([k.row for k in found if tenant is None or k.tenant == tenant.id], last, missed)

    def close(self) -> None:
        """Stop, and write what is left. Idempotent."""
        self._engine.stop_observing(self)
        self._stop.set()
        self._thread.join()
        with self._keeping:
            if self._files is not None:
                self._files.close()

    def _work(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._catch_up()
        self._catch_up()

    def _catch_up(self) -> None:
        """Work up what was handed over."""
        with self._keeping:
            lines = bytearray()
            while True:
                with self._handing_over:
                    if not self._queue:
                        break
                    number, seen = self._queue.popleft()
                    self._queued_blocks -= len(seen.hashes)
                row = self._namer.row(seen)
                self._keep(_Kept(number, seen.tenant.id, row))
                if self._files is not None:
                    lines += json.dumps(row.to_dict(), separators=(",", ":")).encode() + b"\n"
                if len(lines) >= _CHUNK_BYTES:
                    self._write(lines)
                    lines.clear()
                time.sleep(0)  # whoever waits for the interpreter goes first
            if lines:
                self._write(lines)

    def _begin_at(self, number: int) -> None:
        """Forget what was recorded before: between that and this number nobody knows what came."""
        while self._kept and self._kept[0].number < number:
            self._kept_blocks -= len(self._kept.popleft().row.blocks)
        self._begun, self._done = number, max(self._done, number)

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_blocks += len(kept.row.blocks)
        self._done = kept.number
        while len(self._kept) > _KEPT_ROWS or (self._kept_blocks > _KEPT_BLOCKS and len(self._kept) > 1):
            self._kept_blocks -= len(self._kept.popleft().row.blocks)

    def _write(self, lines: bytearray) -> None:
        assert self._files is not None
        try:
            self._files.write(lines)
        except OSError as error:
            if not self._broken:
                log.error("the trace cannot be written; requests are missing in it", extra={"detail": error.strerror})
            self._broken = True
            self._files.close()  # the next lines begin a file: the last one may end in the middle of a line
        else:
            self._broken = False
