"""What a call to a backend may take, and how the backend has been doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tierkv.errors import ConfigError

__all__ = ["Health", "Limits", "LinkState"]

LinkState = Literal["closed", "open", "half-open", "connecting", "shut"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take.

    Attributes
    ----------
    in_flight
        Transfers of blocks under way at once.
    probe_timeout_s, transfer_timeout_s
        Seconds for a call that moves no block, and for one that does, from when its turn has come.
    hedge_s
        Seconds after which a read that has not been answered is asked a second time; None: never.
    """

    in_flight: int = 8
    probe_timeout_s: float = 0.2
    transfer_timeout_s: float = 5.0
    hedge_s: float | None = None

    def __post_init__(self) -> None:
        times = (self.probe_timeout_s, self.transfer_timeout_s, *([] if self.hedge_s is None else [self.hedge_s]))
        if self.in_flight < 1 or min(times) <= 0:
            raise ConfigError(
                "the shared tier's in_flight, timeouts and hedge must be above zero",
                remedy="leave the hedge out to have none",
            )


@dataclass(frozen=True, slots=True)
class Health:
    """How a backend has been doing, as seen by this node.

    Attributes
    ----------
    state
        Whether it is asked: ``closed`` it is, ``open`` it is not for a while, ``half-open`` one call is finding out;
        ``connecting`` it has not been reached yet, ``shut`` the store is closed.
    full
        Whether it refused a write for want of room, and writes are not made for a while.
    opened
        How often the state went from closed to open.
    calls
        Calls made, by what they were for.
    failures
        Calls that came to nothing, by kind: ``timeout``, and those of `BackendError`.
    bytes_in, bytes_out
        Bytes of blocks read from and written to the backend.
    hedged
        Reads that were asked a second time.
    last_error
        The latest failure in words, empty for none.
    """

    state: LinkState = "connecting"
    full: bool = False
    opened: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    hedged: int = 0
    last_error: str = ""
