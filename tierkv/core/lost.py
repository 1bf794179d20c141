"""Why blocks are not there any more: so that a request that misses can be told more than "absent"."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LostBlocks"]


class LostBlocks:
    """The reasons for which the latest blocks were unpublished. All access happens under the engine's lock."""

    def __init__(self, most: int = 1 << 15) -> None:
        self._most = most
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def note(self, key: bytes, reason: str) -> None:
        """Note that a block left its last tier."""
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._most:
            self._reasons.popitem(last=False)

    def reason(self, key: bytes) -> str:
        """Return why a block that is not published is not: ``absent`` for one that never was, as far as is known."""
        return self._reasons.get(key, "absent")
