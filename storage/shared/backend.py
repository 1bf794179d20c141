"""The contract of a backend: the whole of what the shared tier asks of somebody else's storage engine.

A backend keeps named byte strings. It knows nothing of blocks, namespaces or policy, and it may lose anything at any
time: what it gives back is verified by whoever asked. Capacity and eviction are the engine's own business.

All methods are coroutines of one event loop. None of them retries or has a deadline of its own: both belong to the tier
above it, which cancels what takes too long. A method that fails raises `BackendError`, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from tierkv.errors import TierKVError

__all__ = ["Backend", "BackendError", "Capacity", "SupportsClaims"]

Buffer = bytes | bytearray | memoryview


class BackendError(TierKVError):
    """A storage engine did not do what it was asked.

    Attributes
    ----------
    kind
        ``down``: not reached, or the connection broke. ``full``: it refuses writes for want of room. ``refused``: it
        does not know or does not allow this client. ``failed``: anything else it answered.
    """

    def __init__(self, message: str, *, kind: Literal["down", "full", "refused", "failed"], remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine says of itself.

    Attributes
    ----------
    capacity_bytes, used_bytes
        0 where the engine has no bound, or does not say.
    warnings
        Settings that do harm, in sentences with their remedy: an engine that would refuse writes instead of evicting.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    warnings: tuple[str, ...] = field(default=())


class Backend(ABC):
    """A place that keeps byte strings by name. Names are ASCII, at most 200 characters, of letters, digits and ``/-_``.

    Attributes
    ----------
    kind
        What it is called in messages and statistics.
    probe_width
        How many names `present` is best asked for at once: as many as cost about one round trip.
    largest_value
        Bytes of the largest string the engine can keep under one name.
    """

    kind: ClassVar[str]
    probe_width: ClassVar[int]
    largest_value: ClassVar[int]

    @abstractmethod
    async def open(self) -> None:
        """Connect. Called before anything else, and again after it has failed.

        Raises `BackendError` when the engine is not there or refuses, and `ConfigError` when it cannot be used at all.
        """

    @abstractmethod
    async def present(self, names: Sequence[str]) -> list[bool]:
        """Say which names there are. One round trip for at most `probe_width` of them."""

    @abstractmethod
    async def get(self, name: str) -> Buffer | None:
        """Return the bytes under a name, the caller's to keep; None for a name that is not there."""

    @abstractmethod
    async def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        """As `get`, for some small values in one round trip where that is possible."""

    @abstractmethod
    async def get_head(self, name: str, nbytes: int) -> bytes | None:
        """Return up to `nbytes` bytes from the start of what is under a name; None for a name that is not there."""

    @abstractmethod
    async def put(self, name: str, data: Buffer) -> None:
        """Keep `data` under a name in place of what was there. `data` stays as it is until this returns."""

    @abstractmethod
    async def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        """Put a small value if what is there is `expected` (None: nothing); say whether it was. Atomic."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> int:
        """Remove names; return how many were there, or were asked for where the engine does not say."""

    @abstractmethod
    def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that begin with `prefix`, in any order. For inspection only: it reads through the engine."""

    @abstractmethod
    async def capacity(self) -> Capacity:
        """Ask the engine how full it is and how it is set up."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections. Idempotent."""


@runtime_checkable
class SupportsClaims(Protocol):
    """A backend that can say who of several is first, for a while."""

    async def claim(self, name: str, owner: str, ttl_s: float) -> bool:
        """Become the owner of a name, or go on being it, for `ttl_s` seconds; False while it is somebody else's."""

    async def unclaim(self, name: str, owner: str) -> None:
        """Give a name up, if it is still `owner`'s."""
