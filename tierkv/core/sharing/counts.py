"""What is counted of the shared tier, beside what is counted of every tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SharedCounts"]


@dataclass(slots=True)
class SharedCounts:
    """Totals since start, changed under the engine's lock. Documented in docs/metrics.md.

    Attributes
    ----------
    uploaded_blocks, uploaded_bytes
        Blocks written to the shared tier, and their size in memory.
    skipped
        Blocks that were to be written and were not, by reason.
    probes
        Requests that asked the shared tier, by outcome: ``answered``, ``late``.
    claims
        Prefills that were announced to other machines, by outcome: ``granted``, ``elsewhere``.
    cleared
        Areas that another machine cleared; `deleted`: blocks that another one deleted.
    """

    uploaded_blocks: int = 0
    uploaded_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    claims: Counter[str] = field(default_factory=Counter)
    cleared: int = 0
    deleted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for stats."""
        plain: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            plain[name] = dict(value) if isinstance(value, Counter) else value
        return plain
