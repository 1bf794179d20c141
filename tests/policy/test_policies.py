"""Eviction policies against obvious simulators of the same rules, and against a reference replay where there is one."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.policy import POLICIES, EvictionPolicy, make_policy
from tierkv.policy.lru import LRU
from tierkv.policy.slru import SLRU


class SlowLRU:
    """Keys from the next victim to the latest used."""

    def __init__(self) -> None:
        self.order: list[bytes] = []

    def use(self, key: bytes) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    def evict(self, key: bytes) -> None:
        self.order.remove(key)


class SlowSLRU:
    """Segmented LRU, step by step; every list is from the oldest to the latest."""

    def __init__(self, capacity: int, protected_share: float, ghost_factor: float) -> None:
        self.limit = int(protected_share * capacity)
        self.ghost_age = int(ghost_factor * capacity)
        self.probation: list[bytes] = []
        self.protected: list[bytes] = []
        self.sizes: dict[bytes, int] = {}
        self.ghosts: dict[bytes, int] = {}
        self.evicted = 0

    @property
    def order(self) -> list[bytes]:
        return self.probation + self.protected

    def insert(self, key: bytes, size: int) -> None:
        if key in self.sizes:
            self.refresh(key)
            return
        self.sizes[key] = size
        if key in self.ghosts and self.evicted - self.ghosts.pop(key) <= self.ghost_age:
            self.protect(key)
        else:
            self.probation.append(key)

    def touch(self, key: bytes) -> None:
        for part in (self.probation, self.protected):
            if key in part:
                part.remove(key)
                self.protect(key)
                return

    def refresh(self, key: bytes) -> None:
        for part in (self.probation, self.protected):
            if key in part:
                part.remove(key)
                part.append(key)

    def protect(self, key: bytes) -> None:
        self.protected.append(key)
        while sum(self.sizes[k] for k in self.protected) > self.limit:
            self.probation.append(self.protected.pop(0))

    def evict(self, key: bytes) -> None:
        size = self.sizes.pop(key)
        if key in self.probation:
            self.probation.remove(key)
            self.ghosts[key] = self.evicted
            self.evicted += size
        else:
            self.protected.remove(key)

    def remove(self, key: bytes) -> None:
        if key in self.sizes:
            del self.sizes[key]
            for part in (self.probation, self.protected):
                if key in part:
                    part.remove(key)


keys = st.integers(0, 9).map(lambda n: bytes([n]))
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "refresh", "remove", "evict", "evict-first"]), keys, st.integers(1, 3)
    ),
    max_size=80,
)


@given(steps, st.integers(0, 12), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_slru_is_what_its_rules_say(
    changes: list[tuple[str, bytes, int]], capacity: int, protected_share: float, ghost_factor: float
) -> None:
    policy = SLRU(capacity, protected_share, ghost_factor)
    slow = SlowSLRU(capacity, protected_share, ghost_factor)
    for what, key, size in changes:
        if what == "insert":
            policy.insert(key, size)
            slow.insert(key, size)
        elif what.startswith("evict"):
            if slow.order:
                victim = slow.order[0 if what == "evict-first" else size % len(slow.order)]
                policy.evict(victim)
                slow.evict(victim)
        else:
            getattr(policy, what)(key)
            getattr(slow, what)(key)
        assert list(policy.victims()) == slow.order
        assert len(policy) == len(slow.order)


@given(steps)
def test_lru_is_what_its_rules_say(changes: list[tuple[str, bytes, int]]) -> None:
    policy = LRU(10)
    slow = SlowLRU()
    for what, key, size in changes:
        if what == "insert":
            policy.insert(key, size)
            slow.use(key)
        elif what in ("touch", "refresh"):
            getattr(policy, what)(key)
            if key in slow.order:
                slow.use(key)
        elif what == "remove" or not slow.order:
            policy.remove(key)
            slow.order = [k for k in slow.order if k != key]
        else:
            victim = slow.order[0 if what == "evict-first" else size % len(slow.order)]
            policy.evict(victim)
            slow.evict(victim)
        assert list(policy.victims()) == slow.order
        assert len(policy) == len(slow.order)


def test_policies_are_made_by_name() -> None:
    assert set(POLICIES) == {"lru", "slru"}
    assert isinstance(make_policy("slru", 10), SLRU)
    with pytest.raises(ConfigError, match="unknown eviction policy 'mru'"):
        make_policy("mru", 10)


def test_ghosts_are_forgotten() -> None:
    policy = SLRU(4, 0.5, 2.0)
    for n in range(10_000):
        key = n.to_bytes(4, "little")
        policy.insert(key, 1)
        policy.evict(key)
    assert len(policy._ghosts) <= 9
    assert len(policy) == 0


def replay(requests: Iterable[dict[str, Any]], policy: EvictionPolicy, capacity: int) -> int:
    """Hit tokens of a trace: the resident run from each request's first block, then all its blocks used tail first."""
    resident: set[int] = set()
    hits = 0
    for request in requests:
        blocks = request["hash_ids"]
        last = request["input_length"] - 512 * (len(blocks) - 1)
        for position, block in enumerate(blocks):
            if block not in resident:
                break
            hits += 512 if position < len(blocks) - 1 else last
        for block in reversed(blocks):
            key = block.to_bytes(8, "little")
            if block in resident:
                policy.touch(key)
                continue
            if len(resident) == capacity:
                victim = next(policy.victims())
                policy.evict(victim)
                resident.remove(int.from_bytes(victim, "little"))
            policy.insert(key, 1)
            resident.add(block)
    return hits


@pytest.mark.skipif("TIERKV_TRACES" not in os.environ, reason="TIERKV_TRACES names no folder of traces")
@pytest.mark.parametrize("name", ["lru_tail_first", "slru_50pct_ghost2"])
def test_a_replay_gives_the_reference_integers(name: str) -> None:
    """`golden.json` beside the traces holds the hit tokens that an independent implementation counted."""
    traces = Path(os.environ["TIERKV_TRACES"])
    trace = "mooncake_conversation_first1000.jsonl.gz"
    reference = json.loads((traces / "golden.json").read_text())[trace]
    with gzip.open(traces / trace, "rt") as lines:
        requests = sorted(map(json.loads, lines), key=lambda request: request["timestamp"])
    for capacity, counted in reference["caps"].items():
        size = int(capacity)
        policy = LRU(size) if name.startswith("lru") else SLRU(size, 0.5, 2.0)
        assert replay(requests, policy, size) == counted[name]
