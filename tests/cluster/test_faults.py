"""Nobody gets wrong bytes, waits longer than its bound, or fails, whatever happens to what machines share."""

from __future__ import annotations

import pytest

from tests.cluster.faults import FAULTS, Cluster, Fault
from tests.cluster.traffic import BOUND_S, Traffic, summary
from tests.servers.process import wait_until

_BUSY_MACHINE_S = 3.0  # far below what a request would take that waits for a transfer, or for the network
_FAULT_S = 2.0


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_costs_hits_and_nothing_else(cluster: Cluster, fault: Fault) -> None:
    with Traffic(cluster.nodes) as traffic:
        began = traffic.until_shared()
        with fault(cluster):
            traffic.for_seconds(_FAULT_S)
        traffic.until_shared()
    everything = summary(traffic.since(began))
    assert [one.failure for one in traffic.since(began) if one.failure] == []
    assert everything.wrong_blocks == 0
    assert everything.own_hit_rate == 1.0
    assert everything.worst_s < BOUND_S + _BUSY_MACHINE_S
    for node in cluster.nodes:
        with node.connect() as cache:
            wait_until(lambda cache=cache: not any(cache.stats()["leases"].values()), "the end of all leases")  # type: ignore[misc]
