"""Prometheus metrics, made from the engine's stats at scrape time: one source of truth. Listed in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

__all__ = ["render"]

_TOTALS = {
    "acquires": "Acquire calls.",
    "requested_tokens": "Tokens of the full blocks that acquires asked for.",
    "stored_blocks": "Blocks published by commits.",
    "stored_bytes": "Payload bytes published by commits.",
    "load_seconds": "Seconds of load work for blocks that requests used.",
    "hidden_seconds": "Part of the load seconds that was over before the request asked.",
    "exposed_seconds": "Part of the load seconds that the request waited for.",
    "saved_seconds": "Seconds of prefill that hits saved, less those spent waiting for them.",
    "lead_seconds": "Seconds from the arrival of prefetched blocks to their first use.",
    "wasted_bytes": "Payload bytes that were promoted and left memory again unused.",
    "shared_tokens": "Tokens that requests got from a neighbour's prefill instead of computing them, too.",
}
_LABELLED = {
    "hit_tokens": ("tier", "Tokens served, by the tier that held them when they were first asked for."),
    "missed_blocks": ("reason", "Blocks asked for and not served."),
    "promoted_blocks": ("move", "Blocks copied towards the engine."),
    "promoted_bytes": ("move", "Payload bytes copied towards the engine."),
    "demoted_blocks": ("move", "Blocks copied towards the disk."),
    "demoted_bytes": ("move", "Payload bytes copied towards the disk."),
    "evicted_blocks": ("tier", "Blocks that left a tier to make room."),
    "lost_blocks": ("reason", "Published blocks that left the last tier that held them."),
    "corrupt_blocks": ("where", "Verification failures, by tier and cause."),
    "refused_demotions": ("problem", "Blocks the cold tier would not take."),
    "expired_leases": ("kind", "Leases ended by their deadline."),
    "compute_leases": ("outcome", "Compute leases granted, and what became of them."),
    "decisions": ("reason", "Answers to whether loading or computing is faster."),
}


_SHARED_TOTALS = {
    "uploaded_blocks": "Blocks written to the shared tier.",
    "uploaded_bytes": "Payload bytes written to the shared tier, before compression.",
    "bytes_in": "Bytes of coded blocks read from the shared tier.",
    "bytes_out": "Bytes of coded blocks written to the shared tier.",
    "cleared": "Areas that another machine has cleared.",
    "deleted": "Blocks that another machine has deleted.",
    "opened": "Times the shared tier was found not to answer.",
    "hedged": "Reads of the shared tier that were asked a second time.",
}
_SHARED_LABELLED = {
    "skipped": ("reason", "Blocks that were to be written to the shared tier, and were not."),
    "probes": ("outcome", "Requests that asked the shared tier what it has."),
    "claims": ("outcome", "Prefills announced to other machines."),
    "failures": ("kind", "Calls to the shared tier that came to nothing."),
}


_INSIGHT_TOTALS = {
    "requests": "Requests that were looked into.",
    "dropped": "Requests that were not looked into, because others came too fast.",
}
_INSIGHT_LABELLED = {
    "lost_tokens": ("cause", "Tokens asked for and not served, block by block, by cause."),
    "regret_tokens": ("tier", "Tokens that a tier gave up and that were wanted again."),
    "audits": ("verdict", "Hits that engines computed again and compared."),
}


class _Snapshot(Collector):
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        counters = self._stats["counters"]
        for name, help_text in _TOTALS.items():
            yield CounterMetricFamily(f"tierkv_{name}", help_text, value=counters[name])
        for name, (label, help_text) in _LABELLED.items():
            yield _counts(name, help_text, label, counters[name])
        for name, help_text in (
            ("capacity_bytes", "Size of a tier."),
            ("used_bytes", "Bytes in use in a tier, overhead and padding included."),
            ("payload_bytes", "Payload bytes in a tier, before compression."),
            ("blocks", "Blocks in a tier."),
        ):
            gauge = GaugeMetricFamily(f"tierkv_tier_{name}", help_text, labels=["tier"])
            for tier, usage in self._stats["tiers"].items():
                gauge.add_metric([tier], usage[name])
            yield gauge
        cold = self._stats["tiers"].get("cold", {})
        yield GaugeMetricFamily(
            "tierkv_cold_stored_bytes", "Bytes of coded blocks in the cold tier.", value=cold.get("stored_bytes", 0)
        )
        yield _counts("cold_damage", "Damage the cold tier found, blocks and files.", "cause", cold.get("damage", {}))
        dirty = GaugeMetricFamily("tierkv_dirty_bytes", "Payload bytes that no slower tier holds.", labels=["tier"])
        for tier, count in self._stats["dirty_bytes"].items():
            dirty.add_metric([tier], count)
        yield dirty
        leases = GaugeMetricFamily("tierkv_leases", "Live leases.", labels=["kind"])
        for kind, count in self._stats["leases"].items():
            leases.add_metric([kind], count)
        yield leases
        quarantined = self._stats["quarantined_slots"]
        yield GaugeMetricFamily(
            "tierkv_quarantined_slots", "Slots kept from reuse because a writer lost its lease.", value=quarantined
        )
        loads = self._stats["loads"]
        yield GaugeMetricFamily("tierkv_queued_loads", "Loads that have not begun.", value=loads["queued"])
        yield GaugeMetricFamily("tierkv_loading_bytes", "Bytes of the loads that run.", value=loads["running_bytes"])
        yield GaugeMetricFamily("tierkv_sessions", "Sessions remembered.", value=self._stats["sessions"])
        yield GaugeMetricFamily("tierkv_namespaces", "Registered namespaces.", value=self._stats["namespaces"])
        yield GaugeMetricFamily(
            "tierkv_published_blocks", "Blocks that can be hit.", value=self._stats["published_blocks"]
        )
        yield from self._shared()
        yield from self._insight()
        yield from self._http()
        yield GaugeMetricFamily("tierkv_uptime_seconds", "Seconds since start.", value=self._stats["uptime_s"])

    def _shared(self) -> Iterator[Metric]:
        """Of the shared tier; without one all is 0."""
        shared = self._stats.get("shared", {})
        for name, value, help_text in (
            ("up", shared.get("state") == "closed", "Whether the shared tier answers."),
            ("full", shared.get("full", False), "Whether the shared tier refuses blocks for want of room."),
            ("capacity_bytes", shared.get("capacity_bytes", 0), "What the shared tier's engine may use; 0: no bound."),
            ("used_bytes", shared.get("used_bytes", 0), "What the shared tier's engine uses."),
            ("known_blocks", shared.get("known_blocks", 0), "Blocks known to lie in the shared tier."),
            ("waiting_blocks", shared.get("waiting_blocks", 0), "Blocks that wait to be written to the shared tier."),
        ):
            yield GaugeMetricFamily(f"tierkv_shared_{name}", help_text, value=float(value))
        for name, help_text in _SHARED_TOTALS.items():
            yield CounterMetricFamily(f"tierkv_shared_{name}", help_text, value=shared.get(name, 0))
        for name, (label, help_text) in _SHARED_LABELLED.items():
            yield _counts(f"shared_{name}", help_text, label, shared.get(name, {}))

    def _insight(self) -> Iterator[Metric]:
        """Of requests that were looked into; where that is switched off all is 0."""
        insight = self._stats.get("insight") or {}
        for name, help_text in _INSIGHT_TOTALS.items():
            yield CounterMetricFamily(f"tierkv_insight_{name}", help_text, value=insight.get(name, 0))
        for name, (label, help_text) in _INSIGHT_LABELLED.items():
            yield _counts(f"insight_{name}", help_text, label, insight.get(name, {}))
        ratio = GaugeMetricFamily(
            "tierkv_insight_hit_ratio", "Share of blocks that other capacities would have found.", labels=["capacity"]
        )
        for capacity, value in sorted(insight.get("hit_ratio", {}).items()):
            ratio.add_metric([capacity], value)
        yield ratio

    def _http(self) -> Iterator[Metric]:
        http = self._stats["http"]
        yield GaugeMetricFamily("tierkv_connections", "Open connections.", value=http["connections"])
        yield GaugeMetricFamily("tierkv_requests", "Requests being served.", value=http["requests"])
        yield GaugeMetricFamily(
            "tierkv_in_flight_bytes", "Bytes of bodies being received and sent.", value=http["in_flight_bytes"]
        )
        for name, label, help_text in (
            ("refused", "limit", "Requests and connections refused because a limit was reached."),
            ("cut", "stuck", "Connections cut because they got nowhere."),
        ):
            yield _counts(name, help_text, label, http[name])


def _counts(name: str, help_text: str, label: str, counts: Mapping[str, float]) -> CounterMetricFamily:
    """Return a counter with one label."""
    family = CounterMetricFamily(f"tierkv_{name}", help_text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def render(stats: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats))
    return generate_latest(registry), CONTENT_TYPE_LATEST
