"""What the live estimator says that other capacities would have found, against full replays of the same requests.

    TIERKV_TRACES=folder python benchmarks/insight_whatif.py [--policy slru] [trace.jsonl.gz ...]

A cache is opened with about 5 % of a trace's blocks in memory and 50 % on disk, its insight gets every request of the
trace as the cache would hand it over, and then each estimate is compared with a replay of the whole trace at that
capacity. Nothing is stored; the time is the processor's for each request, from the hand-over on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierkv.config import parse_config
from tierkv.core.build import build_engine
from tierkv.core.engine import Engine
from tierkv.core.observing import SeenRequest
from tierkv.insight.live import Insight
from tierkv.policy import make_policy
from tierkv.replay.single import replay
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Request, Trace, read_trace
from tierkv.spec import KVGroup, KVSpec

MIB = 1 << 20
DEMOTE_AHEAD = 0.25
AT_ONCE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--policy", default="slru")
    options = parser.parse_args()
    traces = options.traces or sorted(Path(os.environ.get("TIERKV_TRACES", ".")).glob("*.jsonl.gz"))
    if not traces:
        parser.error("name traces, or the folder they are in with TIERKV_TRACES")
    table = Table(
        "trace", "tier", "times", "blocks", "estimated", "replayed", "off by", title=f"policy {options.policy}"
    )
    for path in traces:
        trace = of_full_blocks(read_trace(path))
        rates, seconds = estimates(trace, options.policy)
        warm = next(rate["capacity_blocks"] for rate in rates if (rate["tier"], rate["factor"]) == ("warm", 1))
        for rate in rates:
            exact = replayed(trace, rate["tier"], rate["capacity_blocks"], warm, options.policy)
            table.add_row(
                path.name.partition(".")[0],
                rate["tier"],
                f"{rate['factor']:g}",
                f"{rate['capacity_blocks']:,}",
                f"{rate['hit_rate']:.4f}",
                f"{exact:.4f}",
                f"{rate['hit_rate'] - exact:+.4f}",
            )
        each = 1e6 * seconds / len(trace.requests)
        table.add_row(
            "", f"{each:.0f} us a request of {trace.references() / len(trace.requests):.0f} blocks", end_section=True
        )
    Console(width=120).print(table)


def of_full_blocks(trace: Trace) -> Trace:
    """The same requests, their last block filled up: caches have full blocks only."""
    requests = [
        Request(request.timestamp, trace.block_tokens * len(request.blocks), request.blocks)
        for request in trace.requests
    ]
    return Trace(tuple(requests), trace.block_tokens)


def estimates(trace: Trace, policy: str) -> tuple[list[dict[str, Any]], float]:
    """What insight says after all requests, and how many seconds of work they were."""
    spec = KVSpec("trace", "1", "uint8", trace.block_tokens, (KVGroup((0,), "full", 1, 1),))
    block_bytes = spec.layout().nbytes
    warm = trace.unique_blocks() // 20 * block_bytes
    with opened(max(1, round(warm / MIB)), policy) as (engine, insight):
        tenant, info = engine.tenant("default"), engine.register(spec)
        begun = time.process_time()
        for start in range(0, len(trace.requests), AT_ONCE):
            for request in trace.requests[start : start + AT_ONCE]:
                hashes = tuple(map(chain_hash, request.blocks))
                missed = {"absent": len(hashes)}
                insight.acquired(
                    SeenRequest(0, 0.0, tenant, info, 0, hashes, (), 0, missed, "absent", "", 0.0, 0.0, None, None)
                )
            insight.catch_up()
        seconds = time.process_time() - begun
        report = insight.report()
    assert report["dropped"] == 0
    return report["whatif"]["rates"], seconds


@contextmanager
def opened(warm_mib: int, policy: str) -> Iterator[tuple[Engine, Insight]]:
    with tempfile.TemporaryDirectory() as directory:
        config = parse_config(
            {
                "state_dir": directory,
                "warm": {"capacity": warm_mib * MIB, "policy": policy, "demote_ahead": DEMOTE_AHEAD},
                "cold": {"capacity": max(10 * warm_mib, 5) * MIB, "codec": "raw", "sync": "none"},
            }
        )
        engine = build_engine(config)
        insight = Insight(engine, config, b"benchmark")
        try:
            yield engine, insight
        finally:
            insight.close()
            engine.close()


def replayed(trace: Trace, tier: str, capacity: int, warm: int, policy: str) -> float:
    """Hit rate of a warm tier alone, or of a cold one below it."""
    if tier == "warm":
        return replay(trace, make_policy(policy, capacity), capacity) / trace.prompt_tokens()
    plan = TierPlan((MemoryPlan("warm", warm, policy),), capacity, DEMOTE_AHEAD)
    return sum(map(sum, replay_tiers(trace, plan).tokens)) / trace.prompt_tokens()


@cache
def chain_hash(block: int) -> bytes:
    return blake2b(block.to_bytes(8, "little"), digest_size=32).digest()


if __name__ == "__main__":
    main()
