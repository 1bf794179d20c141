"""What the cold tier found broken: counted for metrics, told in sentences for people."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from threading import Lock

__all__ = ["DamageLog"]

_KEPT = 100

_log = logging.getLogger(__name__)


class DamageLog:
    """Findings by cause. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._findings: deque[str] = deque(maxlen=_KEPT)

    def note(self, cause: str, finding: str) -> None:
        """Count one finding and log it. `cause` is a short stable word."""
        with self._lock:
            self._counts[cause] += 1
            self._findings.append(finding)
        _log.warning("cold store damage", extra={"cause": cause, "finding": finding})

    @property
    def counts(self) -> Mapping[str, int]:
        """How many findings there were of each cause since the store was opened."""
        with self._lock:
            return dict(self._counts)

    @property
    def findings(self) -> list[str]:
        """The latest findings, oldest first, at most 100."""
        with self._lock:
            return list(self._findings)
