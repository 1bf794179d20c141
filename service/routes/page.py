"""The dashboard: one page and its parts, all served from here."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

__all__ = ["ROUTES"]

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PARTS = {
    file.name: file.read_bytes()
    for file in resources.files("tierkv.service.page").iterdir()
    if file.name.rpartition(".")[2] in _KINDS
}
# Nothing comes from elsewhere, nothing goes elsewhere, and no page of somebody else's can show this one.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def part(request: web.Request) -> web.Response:
    name = request.match_info.get("part", "index.html")
    if name not in _PARTS:
        raise web.HTTPNotFound
    kind = _KINDS[name.rpartition(".")[2]]
    return web.Response(body=_PARTS[name], content_type=kind, charset="utf-8", headers=_HEADERS)


ROUTES = [web.get("/", part), web.get("/page/{part}", part)]
"""Of the dashboard; they tell nothing and so need no token. What the page shows, it asks for like any other client."""
