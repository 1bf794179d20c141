"""Eviction policies, one per file, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from tierkv.errors import ConfigError
from tierkv.policy.arc import ARC
from tierkv.policy.aslru import AdaptiveSLRU
from tierkv.policy.base import EvictionPolicy, K
from tierkv.policy.lru import LRU
from tierkv.policy.s3fifo import S3FIFO
from tierkv.policy.slru import SLRU

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "check_policy", "make_policy"]

DEFAULT_POLICY = "aslru"
# Of what a running cache can know. Belady's rule, which knows the future, is only in the replay.
POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    policy.name: policy for policy in (LRU, SLRU, AdaptiveSLRU, S3FIFO, ARC)
}


def make_policy(name: str, capacity: int, **parameters: float) -> EvictionPolicy[K]:
    """Build the policy called `name` for a tier of `capacity` units.

    Raises `ConfigError` for an unknown name, an unknown parameter, or a value out of its range.
    """
    check_policy(name, parameters)
    return POLICIES[name](capacity, **parameters)


def check_policy(name: object, parameters: Mapping[str, object]) -> None:
    """Raise `ConfigError` unless there is such a policy and it takes such parameters."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}", remedy=_instead(name, POLICIES))
    known = POLICIES[name].parameters
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ConfigError(
                f"the policy {name} has no parameter {parameter!r}",
                remedy=_instead(parameter, known) if known else "leave it out",
            )
        least, most = known[parameter]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= float(value) <= most:  # type: ignore[arg-type]
            raise ConfigError(
                f"{parameter} of the policy {name} cannot be {value!r}",
                remedy=f"use a number from {least:g} to {most:g}",
            )


def _instead(wrong: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f"use one of {', '.join(known)}" + (f"; did you mean {close[0]!r}?" if close else "")
