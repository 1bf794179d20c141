"""HTTP routes, one module per subject."""

from __future__ import annotations

from aiohttp import web

from tierkv.service.routes import (
    blocks,
    chains,
    cluster,
    document,
    events,
    insight,
    inventory,
    leases,
    namespaces,
    operations,
    page,
    sessions,
    single,
    tickets,
    trace,
    trunks,
)

__all__ = ["ROUTES"]

ROUTES: list[web.RouteDef] = [
    *namespaces.ROUTES,
    *chains.ROUTES,
    *cluster.ROUTES,
    *tickets.ROUTES,
    *leases.ROUTES,
    *blocks.ROUTES,
    *single.ROUTES,
    *sessions.ROUTES,
    *operations.ROUTES,
    *inventory.ROUTES,
    *document.ROUTES,
    *events.ROUTES,
    *trunks.ROUTES,
    *insight.ROUTES,
    *trace.ROUTES,
    *page.ROUTES,
]
