"""What many audits found: counts, the worst differences, and the last findings."""

from __future__ import annotations

import logging
from collections import Counter, deque
from threading import Lock
from typing import Any, get_args

from tierkv.insight.audit.result import AuditResult, Verdict

__all__ = ["AuditLog"]

logger = logging.getLogger(__name__)

_KEPT = 16


class AuditLog:
    """Keeps the score of audits, one engine's or many engines'. Safe to use from any thread.

    Parameters
    ----------
    alarm
        Whether a result that is not ok is one line in the process's log, at level error: where, never what.
    """

    def __init__(self, *, alarm: bool = True) -> None:
        self._alarm = alarm
        self._lock = Lock()
        self._verdicts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._tokens = 0
        self._seconds = 0.0
        self._kl_sum, self._kl_count = 0.0, 0
        self._worst = dict.fromkeys(("difference", "relative_error", "of_limit", "ulps_log2", "logits", "kl"), 0.0)
        self._last: deque[AuditResult] = deque(maxlen=_KEPT)

    def add(self, result: AuditResult) -> None:
        """Count a result, and raise the alarm if it is not ok and that is wanted."""
        with self._lock:
            self._verdicts[result.verdict] += 1
            self._tokens += result.tokens
            self._seconds += result.seconds
            for plane in result.planes:
                self._worse("difference", plane.max_difference)
                self._worse("relative_error", plane.relative_error)
                self._worse("ulps_log2", len(plane.ulps) - 1)
                if plane.limit:
                    shown = plane.relative_error if result.basis == "budget" else plane.max_difference
                    self._worse("of_limit", shown / plane.limit)
            if result.logits is not None:
                self._worse("logits", result.logits.max_difference)
                if result.logits.kl is not None:
                    self._worse("kl", result.logits.kl)
                    self._kl_sum += result.logits.kl
                    self._kl_count += 1
            if result.verdict != "ok":
                self._last.append(result)
        if result.verdict != "ok" and self._alarm:
            _tell(result)

    def skip(self, reason: str) -> None:
        """Count what was to be audited and was not: ``busy``, ``failed``, or ``miss`` where nothing was served."""
        with self._lock:
            self._skipped[reason] += 1

    @property
    def verdicts(self) -> dict[str, int]:
        """Audits by verdict, all three of them."""
        with self._lock:
            return {verdict: self._verdicts[verdict] for verdict in get_args(Verdict)}

    @property
    def skipped(self) -> dict[str, int]:
        """Audits that were not made, by reason."""
        with self._lock:
            return dict(self._skipped)

    @property
    def last(self) -> tuple[AuditResult, ...]:
        """The last results that were not ok, the oldest first; 16 at most."""
        with self._lock:
            return tuple(self._last)

    @property
    def clean(self) -> bool:
        """Whether every audit was ok."""
        verdicts = self.verdicts
        return verdicts["ok"] == sum(verdicts.values())

    def to_dict(self) -> dict[str, Any]:
        """Return counts, ``worst`` differences since the start, and the ``last`` findings, for strict JSON.

        ``worst`` has the largest of all audits, whatever their verdict: ``difference`` and ``relative_error`` of K and
        V, ``of_limit`` (difference over what was allowed), ``ulps_log2`` (the largest distance took so many bits),
        ``logits``, ``kl``; infinite ones as the text ``inf``. ``mean_kl`` is in nats.
        """
        verdicts, skipped, last = self.verdicts, self.skipped, self.last
        with self._lock:
            worst = {name: "inf" if value == float("inf") else value for name, value in self._worst.items()}
            mean_kl = self._kl_sum / self._kl_count if self._kl_count else 0.0
            return {
                "audits": verdicts,
                "skipped": skipped,
                "tokens": self._tokens,
                "seconds": self._seconds,
                "worst": worst,
                "mean_kl": "inf" if mean_kl == float("inf") else mean_kl,
                "last": [result.to_dict() for result in last],
            }

    def _worse(self, name: str, value: float) -> None:
        self._worst[name] = max(self._worst[name], value)


def _tell(result: AuditResult) -> None:
    where = result.finding
    fields: dict[str, Any] = {"verdict": result.verdict, "engine": result.engine, "reason": result.reason}
    if where is not None:
        fields |= {"block": where.block, "layer": where.layer, "plane": where.plane, "position": where.token}
    logger.error("audit: what the cache served is not what is computed", extra=fields)
