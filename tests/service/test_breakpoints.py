"""POST /v1/{namespace}/breakpoints: what a gateway that speaks of `cache_control` asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.daemon import BLOCK_BYTES, SPEC, TIERS, Daemon, Raw, chain, running, store

PATH = f"/v1/{SPEC.namespace}/breakpoints"


def hashes(blocks: int, seed: int) -> dict[str, str]:
    return {"hashes": b"".join(chain(blocks, seed=seed).hashes).hex()}


def test_prefixes_are_kept_in_whole_blocks_as_far_as_they_are_published(daemon: Daemon, raw: Raw) -> None:
    with daemon.connect() as cache:
        store(cache, chain(6, seed=70))
        before = cache.stats()["leases"]["pin"]
        points: list[dict[str, Any]] = [{"tokens": 40, "ttl": "1h"}, {}, {"tokens": 96, "ttl": "5m"}, {"tokens": 9}]
        status, answer = raw.json("POST", PATH, {**hashes(8, 70), "breakpoints": points})
        assert status == 200
        assert answer["breakpoints"] == [
            {"tokens": 32, "blocks": 2, "nbytes": 2 * BLOCK_BYTES, "ttl_s": 3600.0},
            {"tokens": 96, "blocks": 6, "nbytes": 6 * BLOCK_BYTES, "ttl_s": 300.0},
            {"tokens": 96, "blocks": 6, "nbytes": 6 * BLOCK_BYTES, "ttl_s": 300.0},
            {"tokens": 0, "blocks": 0, "nbytes": 0, "ttl_s": 300.0},
        ]
        assert cache.stats()["leases"]["pin"] == before + 3


def test_no_more_than_half_of_the_warm_tier() -> None:
    with running({**TIERS, "warm": {"capacity": "1MiB"}}) as daemon, daemon.connect() as cache:
        raw = Raw(daemon.tcp_port)
        for seed in (1, 2):
            store(cache, chain(40, seed=seed))
        assert raw.json("POST", PATH, {**hashes(40, 1), "breakpoints": [{"tokens": 160}, {}]})[0] == 200
        status, problem = raw.json("POST", PATH, {**hashes(40, 2), "breakpoints": [{"tokens": 160}, {}]})
        assert (status, problem["type"]) == (429, "urn:tierkv:problem:limit-exceeded")
        assert cache.stats()["leases"]["pin"] == 2


def test_limits_pin_bounds_the_time() -> None:
    with running({**TIERS, "limits": {"pin": "10min"}}) as daemon, daemon.connect() as cache:
        store(cache, chain(2))
        asked = {**hashes(2, 0), "breakpoints": [{"ttl": "1h"}, {"ttl": "5m", "tokens": 16}]}
        answer = Raw(daemon.tcp_port).json("POST", PATH, asked)[1]
        assert [point["ttl_s"] for point in answer["breakpoints"]] == [600.0, 300.0]


@pytest.mark.parametrize(
    "points", [[], [{}] * 65, [{"ttl": "2h"}], [{"tokens": -1}], [{"tokens": 1.5}], [{"blocks": 1}], {}, None]
)
def test_what_is_no_breakpoint(daemon: Daemon, raw: Raw, points: Any) -> None:
    daemon.connect().close()
    status, problem = raw.json("POST", PATH, {**hashes(2, 0), "breakpoints": points})
    assert (status, problem["type"]) == (400, "urn:tierkv:problem:invalid-request")
