"""Why blocks were not served: every block that a request missed, under one cause.

The cache says why the first missing block is missing, and counts those behind it with it. Here they are told apart: of
a conversation that was evicted and has gone on since, what was evicted is one thing, and the new turn another.
"""

from __future__ import annotations

from collections import Counter

from tierkv.core.observing import SeenRequest

__all__ = ["CAUSES", "DIVERGED", "NEW", "SHARED_AWAY", "UNSTORED", "lost_blocks"]

NEW = "new"
DIVERGED = "diverged"
EVICTED = "evicted"
UNSTORED = "unstored"
SHARED_AWAY = "shared_away"

CAUSES = {
    NEW: "nobody had asked for them before",
    DIVERGED: "new, because the prompt left its template before the template's end",
    EVICTED: "stored, and evicted",
    "not_demoted_in_time": "stored, and evicted before the next tier had them",
    UNSTORED: "asked for before, and not stored since",
    "late": "not loaded in time",
    "cheaper_computed": "loading would have taken longer than computing",
    "no_room": "no room in memory to load them to",
    "failed": "could not be loaded",
    "corrupt": "damaged, and removed",
    "deleted": "deleted on request",
    "cleared": "cleared with their namespace on request",
    SHARED_AWAY: "known, and gone from this machine while the shared tier did not answer",
}
"""What each cause means. Others may come: those of the cache that are not here are passed on as they are."""

_ABSENT = "absent"
_HELPED_BY_SHARED = (_ABSENT, EVICTED, "not_demoted_in_time")


def lost_blocks(seen: SeenRequest, known: int, *, shared_away: bool) -> dict[str, int]:
    """Return the blocks that a request missed, by cause; with those served they are all that it asked for.

    Parameters
    ----------
    known
        Length of the prefix of its chain that had been asked for before.
    shared_away
        There is a shared tier, and it did not answer.
    """
    total = len(seen.hashes)
    lost = Counter(seen.missed)
    gone = total - seen.published
    if gone:
        lost[seen.lost] -= gone
        again = max(min(known, total) - seen.published, 0 if seen.lost == _ABSENT else 1)
        cause = UNSTORED if seen.lost == _ABSENT else seen.lost
        if shared_away and seen.lost in _HELPED_BY_SHARED:
            cause = SHARED_AWAY
        lost[cause] += again
        lost[NEW] += gone - again
    if lost[_ABSENT]:  # was there, and left while it was to be loaded
        lost[EVICTED] += lost.pop(_ABSENT)
    return {cause: blocks for cause, blocks in lost.items() if blocks}
