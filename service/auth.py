"""Who is asking, and what they may: tokens, roles, and the tenant a request speaks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multidict import CIMultiDictProxy

from tierkv.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized
from tierkv.service.tokens import Role, Token, TokenFile, parse_token
from tierkv.wire import TENANT_HEADER, check_tenant

__all__ = ["CALLER", "NODE_ROUTES", "OPEN_ROUTES", "Authority", "Caller", "may"]

CALLER = "tierkv.caller"
"""Key of the `Caller` of a request."""
OPEN_ROUTES = frozenset({("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/"), ("GET", "/page/{part}")})
"""Routes that need no token: health, and the files of the dashboard. They tell nothing about blocks or tenants."""
NODE_ROUTES = frozenset({("POST", "/v1/peer/lookup")})
"""Routes for other nodes: they check a signature of their own (`tierkv.service.cluster.signing`), and no token."""
_READER = frozenset(
    {
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/events"),
        ("GET", "/v1/insight"),
        ("GET", "/v1/namespaces"),
        ("GET", "/v1/stats"),
        ("GET", "/v1/trace"),
        ("GET", "/v1/trunks"),
        ("POST", "/v1/{ns}/lookup"),
        ("POST", "/v1/{ns}/where"),
    }
)
_ENGINE = _READER | {
    ("PUT", "/v1/namespaces"),
    ("DELETE", "/v1/namespaces/{ns}"),
    ("GET", "/v1/attach"),
    *(("POST", f"/v1/{{ns}}/{verb}") for verb in ("prefetch", "acquire", "reserve", "touch")),
    *(("POST", f"/v1/{{ns}}/{verb}") for verb in ("pin", "unpin", "breakpoints")),
    *(("POST", f"/v1/{{ns}}/blocks:{verb}") for verb in ("get", "put")),
    *((method, "/v1/{ns}/blocks/{hash}") for method in ("GET", "PUT", "DELETE")),
    *(("POST", f"/v1/{{ns}}/sessions/{{id}}/{verb}") for verb in ("end", "pause")),
    *(("POST", f"/v1/leases/{{id}}/{verb}") for verb in ("commit", "abort", "release", "renew")),
    *((method, "/v1/tickets/{id}") for method in ("GET", "DELETE")),
    ("POST", "/v1/tickets/{id}/wait"),
    ("POST", "/v1/insight/audits"),
}
_ALLOWED: Mapping[Role, frozenset[tuple[str, str]]] = {"reader": _READER, "engine": _ENGINE}
"""An operator may ask everything, and nobody else what is not listed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is from: the tenant it speaks for, and the role it has."""

    tenant: str
    role: Role


def may(role: Role, method: str, route: str) -> bool:
    """Say whether a role may use a route, named by method (GET stands for HEAD too) and path pattern."""
    return role == "operator" or (method, route) in _ALLOWED[role]


# What an unknown id is compared with, so that it takes as long as a known one.
_NOBODY = Token("0" * 8, "0" * 64, "nobody", "reader", "")


class Authority:
    """Knows the tokens. Without any, callers are trusted: then only the loopback interface and the socket are served.

    Parameters
    ----------
    state_dir
        Where the tokens are kept; None: there are none.

    Raises `ConfigError` or `StorageError` for a file that cannot be used. Reads it.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._file = None if state_dir is None else TokenFile(state_dir)
        self._tokens: Mapping[str, Token] | None = None
        self.reload()

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return self._tokens is not None

    def reload(self) -> None:
        """Read the tokens again; revoked ones are refused from now on. Reads a file. Safe to call from any thread.

        Raises `ConfigError` or `StorageError`, and changes nothing then. A file that has disappeared is such an error:
        its loss must not open the daemon.
        """
        tokens = None if self._file is None else self._file.read()
        if tokens is None and self._tokens is not None:
            assert self._file is not None
            raise ConfigError(
                f"{self._file.path} has disappeared; its tokens stay valid",
                remedy="restore it, or restart the daemon to go on without tokens",
            )
        self._tokens = None if tokens is None else {token.id: token for token in tokens}

    def caller(self, headers: CIMultiDictProxy[str]) -> Caller:
        """Return whom a request is from.

        Raises `Unauthorized` without a valid token where one is needed, `Forbidden` for the name of a tenant that is
        not the token's, and `InvalidRequest` for headers that say two things.
        """
        named = _single(headers, TENANT_HEADER)
        if self._tokens is None:
            return Caller("default" if named is None else check_tenant(named), "operator")
        token = self._bearer(self._tokens, _single(headers, "Authorization"))
        tenant = None if named is None else check_tenant(named)
        if tenant is None or tenant == token.tenant:
            return Caller(token.tenant, token.role)
        if token.role != "operator":
            raise Forbidden(
                f"the token is not tenant {tenant!r}'s", remedy=f"leave {TENANT_HEADER} out: the token says whose it is"
            )
        return Caller(tenant, token.role)

    @staticmethod
    def _bearer(tokens: Mapping[str, Token], authorization: str | None) -> Token:
        if authorization is None:
            raise Unauthorized(
                "a token is needed", remedy="send Authorization: Bearer and a token of `tierkv token new`"
            )
        scheme, _, credentials = authorization.partition(" ")
        parsed = parse_token(credentials.strip(" ")) if scheme.lower() == "bearer" else None
        if parsed is not None:
            token = tokens.get(parsed[0])
            if (token or _NOBODY).has_secret(parsed[1]) and token is not None:
                return token
        raise Unauthorized(
            "the token is not known: it is mistyped, was revoked, or is another daemon's",
            remedy="make one with `tierkv token new`, and have the daemon read it (SIGHUP or restart)",
        )


def _single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    found = headers.getall(name, [])
    if len(found) > 1:
        raise InvalidRequest(f"the header {name} was sent {len(found)} times", remedy="send it once")
    return found[0] if found else None
