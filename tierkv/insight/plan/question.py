"""What a plan is about: sizes, policies, speeds and prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.policy import check_policy

__all__ = ["Prices", "Question", "Setup", "Speeds", "default_sizes"]

HOURS_PER_MONTH = 730
_GIB = 1 << 30
_HALVINGS = 8  # of the default memory sizes


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast things go.

    Attributes
    ----------
    prefill
        Tokens the engine prefills per second.
    ram, disk
        Bytes per second that each tier delivers.
    """

    prefill: float
    ram: float
    disk: float


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, in any one currency.

    Attributes
    ----------
    gpu_hour
        An hour of the engine's GPU.
    ram_gib_month, disk_gib_month
        A GiB of each tier for a month of 730 hours.
    """

    gpu_hour: float
    ram_gib_month: float
    disk_gib_month: float

    def storage(self, ram_bytes: int, disk_bytes: int) -> float:
        """Return what the tiers cost per hour."""
        month = ram_bytes / _GIB * self.ram_gib_month + disk_bytes / _GIB * self.disk_gib_month
        return month / HOURS_PER_MONTH

    def prefill(self, seconds: float, span_s: float) -> float:
        """Return what `seconds` of prefill in `span_s` seconds of traffic cost per hour of it."""
        return self.gpu_hour * seconds / span_s if span_s else 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration: a policy, and bytes of memory and disk; a disk of 0 bytes is none."""

    policy: str
    ram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Question:
    """What to find out.

    Attributes
    ----------
    policies
        Eviction policies of the memory tier, by name.
    ram_bytes, disk_bytes
        Sizes. Of the pairs, those with a disk smaller than memory are left out.
    block_bytes, block_tokens
        KV of one block of the trace, all layers, and its tokens.
    demote_ahead
        Share of the memory tier that is kept clean, as `warm.demote_ahead` says.
    prices
        None: costs are not asked for.
    """

    policies: tuple[str, ...]
    ram_bytes: tuple[int, ...]
    disk_bytes: tuple[int, ...]
    block_bytes: int
    block_tokens: int
    speeds: Speeds
    demote_ahead: float = 0.25
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for policy in self.policies:
            check_policy(policy, {})
        if not self.policies:
            raise ConfigError("no policy to plan for", remedy="name one with --policy")
        for name, sizes in (("memory", self.ram_bytes), ("disk", [size for size in self.disk_bytes if size])):
            small = [size for size in sizes if size < self.block_bytes]
            if small:
                raise ConfigError(
                    f"{name} of {small[0]:,} bytes has no room for a block of {self.block_bytes:,}",
                    remedy="ask about larger sizes, or give the right --block-bytes",
                )
        if not self.setups():
            raise ConfigError("no disk is as large as the memory above it", remedy="add larger sizes, or --disk 0")

    def setups(self) -> tuple[Setup, ...]:
        """Return all configurations in question, by policy, disk and memory."""
        return tuple(
            Setup(policy, ram, disk)
            for policy in self.policies
            for disk in sorted(set(self.disk_bytes))
            for ram in sorted(set(self.ram_bytes))
            if not disk or disk >= ram
        )


def default_sizes(total_bytes: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return sizes of memory and of disk that show a whole curve: powers of two up to all blocks of a trace.

    Memory from a 128th of everything to everything, disks of none, a quarter and everything.
    """
    everything = 1
    while everything < total_bytes:
        everything *= 2
    ram = [size for halvings in range(_HALVINGS) if (size := everything >> halvings)]
    return sorted(ram), [0, everything // 4, everything]
