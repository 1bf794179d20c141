"""What faults of a shared tier cost: two nodes, three servers, a network of their own, one fault at a time.

    sudo python -m benchmarks.shared_faults                              all faults, about two minutes
    sudo python -m benchmarks.shared_faults --seconds 10 "servers full"  some, for longer

Both nodes get requests one after the other, whose prompts are new, the other node's or their own; every block is
compared with what was stored. `hits` are the parts of what the other node had stored that were served: before the
fault, during it, and for as long after it; `again` says how many seconds after it both nodes shared as before.
`acquire` are times from question to answer, of requests with a known prefill rate. With that none should take much
longer than the title says. Needs what tests/cluster needs.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from tests.cluster.faults import FAULTS, Cluster, Fault, running_cluster
from tests.cluster.network import missing_network
from tests.cluster.node import PROBE_S
from tests.cluster.traffic import BLOCKS, BOUND_S, RECOMPUTE_S, Traffic, summary
from tests.servers.redis import MISSING_REDIS
from tests.service.daemon import short_directory


def measure(cluster: Cluster, fault: Fault, seconds: float) -> list[str]:
    """Return the table's columns for one fault."""
    with Traffic(cluster.nodes) as traffic:
        traffic.until_shared()
        began = time.monotonic()
        traffic.for_seconds(seconds)
        breaks = time.monotonic()
        with fault(cluster):
            traffic.for_seconds(seconds)
            mends = time.monotonic()
        mended = time.monotonic()
        again = traffic.until_shared()
        traffic.for_seconds(max(0.0, mended + seconds - time.monotonic()))
    everything = summary(traffic.since(began))
    phases = [
        summary(traffic.since(*phase)) for phase in ((began, breaks), (breaks, mends), (mended, mended + seconds))
    ]
    return [
        str(everything.requests),
        str(everything.wrong_blocks),
        str(everything.failed),
        *(f"{one.other_hit_rate:.2f}" for one in phases),
        f"{again - mended:.1f}",
        *(f"{1e3 * one.median_s:.1f} / {1e3 * one.worst_s:.0f}" for one in phases),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", choices=[[], *FAULTS], help="which; default: all")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each lasts, and before and after it (3)")
    arguments = parser.parse_args()
    missing = MISSING_REDIS or missing_network()
    if missing:
        parser.exit(2, f"{missing}\n")
    compute_ms, ask_ms, bound_ms = (round(1e3 * seconds) for seconds in (RECOMPUTE_S, PROBE_S, BOUND_S))
    table = Table(
        title=f"Faults of {arguments.seconds:g} s. An acquire may take {bound_ms} ms: {compute_ms} to compute the "
        f"{BLOCKS} blocks it asks for, a tenth more, and {ask_ms} to ask what is there."
    )
    table.add_column("fault")
    for column in ("requests", "wrong", "failed", "hits before", "during", "after", "again s"):
        table.add_column(column, justify="right")
    for column in ("acquire ms before", "during", "after"):
        table.add_column(f"{column}\nmedian / worst", justify="right")
    with short_directory() as home, running_cluster(home) as cluster:
        for name in arguments.faults or FAULTS:
            table.add_row(name, *measure(cluster, FAULTS[name], arguments.seconds))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
