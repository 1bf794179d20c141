"""HTTP routes, one module per subject."""

from __future__ import annotations

from aiohttp import web

from tierkv.service.routes import blocks, chains, leases, namespaces, operations, sessions, tickets

__all__ = ["ROUTES"]

ROUTES: list[web.RouteDef] = [
    *namespaces.ROUTES,
    *chains.ROUTES,
    *tickets.ROUTES,
    *leases.ROUTES,
    *blocks.ROUTES,
    *sessions.ROUTES,
    *operations.ROUTES,
]
