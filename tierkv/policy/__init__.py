"""Eviction policies, one per file, by name."""

from __future__ import annotations

from tierkv.errors import ConfigError
from tierkv.policy.base import EvictionPolicy
from tierkv.policy.lru import LRU
from tierkv.policy.slru import SLRU

__all__ = ["POLICIES", "EvictionPolicy", "make_policy"]

POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRU, SLRU)}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Build the policy called `name` for a tier of `capacity` units. Raises `ConfigError` for an unknown name."""
    try:
        return POLICIES[name](capacity)
    except KeyError:
        raise ConfigError(
            f"unknown eviction policy {name!r}", remedy=f"use one of {', '.join(sorted(POLICIES))}"
        ) from None
