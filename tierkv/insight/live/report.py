"""The report: what was seen, as plain data, with names instead of keys and prices where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from tierkv.config import InsightConfig
from tierkv.core.engine import Engine
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.live.causes import DIVERGED, NEW
from tierkv.insight.live.room import RoomEstimates
from tierkv.insight.live.tally import Tally
from tierkv.insight.live.templates import Divergence, Template
from tierkv.insight.live.tree import Area
from tierkv.insight.live.windows import TenantTotals, Window

__all__ = ["NOTHING", "Report", "make_report", "make_window_report"]

Report: TypeAlias = dict[str, Any]

NOTHING: Report = {
    "enabled": False,
    "since": 0.0,
    "window_s": None,
    "sample": 0.0,
    "dropped": 0,
    **Tally().to_dict(),
    "lost_price": None,
    "tenants": {},
    "templates": [],
    "rest": {**Tally().to_dict(), "lost_price": None},
    "whatif": None,
}
"""The report of a daemon that does not look into requests."""

_DIVERGENCES = 8
_TEXT_TOKENS = 256


def make_report(
    tenants: Mapping[bytes, TenantTotals],
    templates: Sequence[Template],
    rest: Sequence[tuple[Area, Tally]],
    room: RoomEstimates | None,
    audits: Mapping[bytes, AuditLog],
    *,
    engine: Engine,
    terms: InsightConfig,
    salt: bytes,
    since: float,
    dropped: int,
) -> Report:
    """Put a report together, as documented in docs/insight.md.

    Parameters
    ----------
    tenants
        Totals by tenant id.
    templates, rest
        What `find_templates` found of these tenants. The most requested templates are listed; what was asked for in
        others is counted with the rest.
    room
        Estimates of other capacities; None where there are none to be shown.
    audits
        By tenant id.
    terms, salt
        How many templates are listed, their labels and prices; what their names are hashed with.
    since, dropped
        When counting began, and how many requests were not looked into.
    """
    ranked = sorted(templates, key=lambda found: (-found.tally.requests, found.key))
    listed, others = ranked[: terms.templates], ranked[terms.templates :]
    beside = Tally()
    for tally in (*(tally for _, tally in rest), *(found.tally for found in others)):
        beside.add(tally)
    return {
        **_counted(_diverging(tenants, templates), audits, engine, terms, since, None, dropped),
        "templates": [_template(found, engine, terms, salt) for found in listed],
        "rest": _priced(beside, terms),
        "whatif": _what_if(room),
    }


def make_window_report(
    window: Window, seconds: float, tenants: Mapping[bytes, TenantTotals], *, engine: Engine, terms: InsightConfig
) -> Report:
    """Put a report of a window together: counts of these of its tenants, all of them in the rest.

    Templates, estimates and audits are those of all requests since the start, so it has none.
    """
    counted = _counted(tenants, {}, engine, terms, window.since, seconds, window.dropped)
    rest = {name: counted[name] for name in NOTHING["rest"]}
    return {**counted, "templates": [], "rest": rest, "whatif": None}


def _diverging(tenants: Mapping[bytes, TenantTotals], templates: Sequence[Template]) -> dict[bytes, TenantTotals]:
    """Tell in each tenant's totals, too, what of its new content its templates lost by diverging."""
    diverged: Counter[bytes] = Counter()
    for found in templates:
        diverged[found.area.tenant] += found.tally.lost_tokens[DIVERGED]
    told = {}
    for tenant, totals in tenants.items():
        tally = Tally()
        tally.add(totals.tally)
        tally.move(NEW, DIVERGED, min(diverged[tenant], tally.lost_tokens[NEW]))
        told[tenant] = TenantTotals(tally, totals.regret)
    return told


def _counted(
    tenants: Mapping[bytes, TenantTotals],
    audits: Mapping[bytes, AuditLog],
    engine: Engine,
    terms: InsightConfig,
    since: float,
    seconds: float | None,
    dropped: int,
) -> Report:
    total = Tally()
    for totals in tenants.values():
        total.add(totals.tally)
    none = TenantTotals()
    return {
        "enabled": True,
        "since": since,
        "window_s": seconds,
        "sample": terms.sample,
        "dropped": dropped,
        **_priced(total, terms),
        "tenants": {
            _tenant_name(engine, tenant): {
                **_priced(tenants.get(tenant, none).tally, terms),
                "regret": tenants.get(tenant, none).regret.to_dict(),
                "audits": audits[tenant].to_dict() if tenant in audits else None,
            }
            for tenant in sorted({*tenants, *audits})
        },
    }


def template_name(area: Area, key: bytes, salt: bytes) -> str:
    """Name a template: a hash that says nothing about its prompts to whoever does not have the salt."""
    return blake2b(area.tenant + area.namespace + key, digest_size=6, key=salt[:64]).hexdigest()


def _template(found: Template, engine: Engine, terms: InsightConfig, salt: bytes) -> dict[str, Any]:
    name = template_name(found.area, found.key, salt)
    namespace = engine.namespace_of(found.area.namespace)
    plain: dict[str, Any] = {
        "id": name,
        "label": (terms.labels or {}).get(name),
        "parent": template_name(found.area, found.parent, salt) if found.parent else None,
        "tenant": _tenant_name(engine, found.area.tenant),
        "namespace": found.area.namespace.hex(),
        "model": namespace.spec.model if namespace is not None else None,
        "start": found.start,
        "end": found.end,
        "entered": found.entered,
        **_priced(found.tally, terms),
        "divergences": [_divergence(point, found) for point in found.divergences[:_DIVERGENCES]],
    }
    if found.text:
        plain["text"] = list(found.text[:_TEXT_TOKENS])
    return plain


def _divergence(point: Divergence, found: Template) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "token": point.token,
        "requests": point.requests,
        "share": point.requests / found.entered,
        "lost_tokens": point.lost_tokens,
    }
    if point.trunk_text or point.left_text:
        plain["text"] = {"trunk": list(point.trunk_text), "left": [list(text) for text in point.left_text]}
    return plain


def _priced(tally: Tally, terms: InsightConfig) -> dict[str, Any]:
    plain = tally.to_dict()
    price: dict[str, float] | None = None
    if terms.price_per_million_tokens is not None:
        price = {cause: count * terms.price_per_million_tokens / 1e6 for cause, count in plain["lost_tokens"].items()}
    elif terms.price_per_gpu_hour is not None:
        price = {cause: seconds * terms.price_per_gpu_hour / 3600 for cause, seconds in plain["lost_s"].items()}
    return {**plain, "lost_price": price}


def _what_if(room: RoomEstimates | None) -> dict[str, Any] | None:
    if room is None:
        return None
    return {
        "since": room.since,
        "block_bytes": room.block_bytes,
        "mixed": room.mixed,
        "blocks": room.rates[0].blocks if room.rates else 0,
        "rates": [
            {
                "tier": rate.tier,
                "factor": rate.factor,
                "capacity_blocks": rate.capacity,
                "hit_blocks": rate.hit_blocks,
                "hit_rate": rate.hit_rate,
            }
            for rate in room.rates
        ],
    }


def _tenant_name(engine: Engine, tenant: bytes) -> str:
    known = engine.tenant_of(tenant)
    return known.name if known is not None else tenant.hex()
