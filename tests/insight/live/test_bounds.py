"""However much passes: what is remembered of evictions and for estimates stays within bounds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.insight.live.support import SPEC, observed
from tests.traces import block_key
from tierkv.core.observing import SeenRequest
from tierkv.insight.live import room
from tierkv.insight.live.regret import Ghost, Ghosts


def test_ghosts_are_those_of_the_latest_evictions() -> None:
    ghosts = Ghosts(["warm", "cold"], most=100)
    keys = [block_key(number) for number in range(1000)]
    for start in range(0, 1000, 7):
        ghosts.left(keys[start : start + 7], Ghost("warm", start, 0.0, last=False))
        assert len(ghosts) <= 100
    ghosts.left(keys[990:], Ghost("cold", 2000, 1.0, last=True))
    assert len(ghosts) == 100


def test_estimates_go_on_with_a_coarser_sample_when_they_take_too_much(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a few blocks, none of which comes back: the worst there is."""
    most, every = 3000, 64
    monkeypatch.setattr(room, "_MOST_ENTRIES", most)
    monkeypatch.setattr(room, "_LOOK_EVERY", every)
    choose = random.Random(0)
    settings = {"state_dir": str(tmp_path), "warm": {"capacity": "32MiB"}, "cold": {"capacity": "256MiB"}}
    with observed(settings) as seen:
        engine = seen.cache.engine
        tenant, info = engine.tenant("default"), engine.register(SPEC)
        estimated = room.Room(seen.config, engine.placement)
        begun = set()
        for number in range(4000):
            hashes = [block_key(choose.randrange(10**12)) for _ in range(4)]
            asked = SeenRequest(
                0, float(number), tenant, info, 0, hashes, (), 0, {"absent": 4}, "absent", "", 0.0, 0.0, None, None
            )
            estimated.request(asked)
            assert estimated.entries() <= most + every * 4 * 8
            estimates = estimated.estimates()
            assert estimates is not None
            begun.add(estimates.since)
        assert 1 < len(begun) < 6
