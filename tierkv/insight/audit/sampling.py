"""Which hits are audited: a share that nobody outside can foresee or avoid."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from threading import Lock

from tierkv.errors import InvalidRequest

__all__ = ["Sampler"]

_SCALE = 1 << 64


class Sampler:
    """Takes a share of what it is asked about. Safe to call from any thread.

    The decision is a keyed hash of how many were asked about before: it depends on nothing a request carries, so no
    kind of request is always or never taken, and a prefix that is hit often is taken sooner or later.

    Parameters
    ----------
    share
        From 0, nothing, to 1, everything.
    seed
        The key. None: a new random one. With the same seed the same turns are taken, which is for tests.

    Raises
    ------
    InvalidRequest
        `share` is no share.
    """

    def __init__(self, share: float, *, seed: bytes | None = None) -> None:
        if not 0 <= share <= 1:
            raise InvalidRequest(f"cannot sample a share of {share}", remedy="choose from 0 to 1, such as 0.05")
        self._bound = int(share * _SCALE)
        self._key = blake2b(seed).digest() if seed is not None else secrets.token_bytes(64)
        self._asked = 0
        self._lock = Lock()

    def take(self) -> bool:
        """Say whether this one is taken."""
        with self._lock:
            number, self._asked = self._asked, self._asked + 1
        drawn = blake2b(number.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(drawn, "little") < self._bound
