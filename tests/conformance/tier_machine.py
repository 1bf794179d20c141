"""A tier against a dict: any sequence of operations must give the same answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.errors import BodyMismatch, NotFound
from tierkv.storage.tier import BlockMeta, Tier, checksum

__all__ = ["tier_machine"]


def tier_machine(make_tier: Callable[[Path], Tier], directory: Path, payload_bytes: int) -> type[RuleBasedStateMachine]:
    """Return a class of state machines, each instance over a new tier in a directory of its own.

    Every tier must have room for all that one run puts: 25 blocks of `payload_bytes`, deleted ones included.
    """
    runs = count()
    keys = st.integers(0, 4).map(lambda n: bytes([n]) * 32)
    payloads = st.builds(
        lambda length, seed: bytes([seed]) * length,
        st.sampled_from([0, 1, 64, 4096, payload_bytes // 2 + 1, payload_bytes]),
        st.integers(0, 255),
    )

    class TierMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            home = directory / f"run-{next(runs)}"
            home.mkdir()
            self.tier = make_tier(home)
            self.model: dict[bytes, tuple[bytes, BlockMeta]] = {}

        @rule(key=keys, payload=payloads, depth=st.integers(0, 1000))
        def put(self, key: bytes, payload: bytes, depth: int) -> None:
            meta = BlockMeta(len(payload), checksum(payload), depth=depth)
            self.tier.put(key, payload, meta)
            self.model.setdefault(key, (payload, meta))

        @rule(key=keys, payload=payloads.filter(len))
        def put_cut_short(self, key: bytes, payload: bytes) -> None:
            with pytest.raises(BodyMismatch):
                self.tier.put(key, payload[:-1], BlockMeta(len(payload), checksum(payload)))

        @rule(key=keys)
        def read(self, key: bytes) -> None:
            out = bytearray(payload_bytes)
            if key in self.model:
                payload, meta = self.model[key]
                assert self.tier.read_into(key, memoryview(out)) == meta
                assert out[: meta.length] == payload
            else:
                with pytest.raises(NotFound):
                    self.tier.read_into(key, memoryview(out))

        @rule(key=keys)
        def delete(self, key: bytes) -> None:
            assert self.tier.delete(key) == (self.model.pop(key, None) is not None)

        @rule()
        def flush(self) -> None:
            self.tier.flush()

        @invariant()
        def knows_the_same_blocks(self) -> None:
            assert dict(self.tier.records()) == {key: meta for key, (_, meta) in self.model.items()}
            usage = self.tier.usage()
            assert usage.blocks == len(self.model)
            keys = [bytes([n]) * 32 for n in range(5)]
            assert [self.tier.has(key) for key in keys] == [key in self.model for key in keys]
            assert self.tier.holds(keys) == next((n for n, key in enumerate(keys) if key not in self.model), 5)
            assert usage.payload_bytes == sum(meta.length for _, meta in self.model.values())
            assert usage.used_bytes <= usage.capacity_bytes

        def teardown(self) -> None:
            self.tier.close()

    return TierMachine
