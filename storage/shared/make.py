"""From a URL to a backend."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tierkv.errors import ConfigError
from tierkv.storage.shared.backend import Backend
from tierkv.storage.shared.objects import ObjectBackend
from tierkv.storage.shared.valkey import ValkeyBackend

__all__ = ["make_backend"]

_VALKEY = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Scheme -> whether it is encrypted."""
_OBJECTS = ("s3", "gs", "az")
_PORT = 6379
_FORMS = (
    "use valkey://host:port, valkeys:// for TLS, redis:// or rediss://, with more nodes of a cluster after commas, "
    "or s3://bucket/prefix, gs://bucket/prefix, az://container/prefix"
)


def make_backend(
    url: str,
    *,
    cluster: bool | None = None,
    username: str | None = None,
    password_file: Path | None = None,
    password_env: str | None = None,
    root_certificates: Path | None = None,
    options: Mapping[str, str] | None = None,
    patience_s: float = 60.0,
    environ: Mapping[str, str] = os.environ,
) -> Backend:
    """Make the backend a URL names. Does not connect; reads the files named here.

    Parameters
    ----------
    url
        ``valkey://host:port[,host:port][/database]``, the same with ``valkeys`` (TLS), ``redis`` or ``rediss``;
        ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``. Never with a user or a password.
    cluster
        Whether the servers are a Valkey cluster; None: ask.
    username, password_file, password_env
        Of a Valkey server: the user, and the file or the environment variable that holds the password.
    root_certificates
        PEM file by which to verify the server, of a URL or an endpoint that encrypts; None: the system's.
    options
        Of an object store, see `ObjectBackend`.
    patience_s
        Seconds after which a client gives a request up by itself; more than any timeout of the store.

    Raises
    ------
    ConfigError
        For a URL of no such form, for settings that are of the other kind of backend, and for a file or a variable
        that is not there. What was given as a secret is never part of it.
    """
    split = _split(url)
    certificates = None if root_certificates is None else _certificates(root_certificates)
    if split.scheme in _VALKEY:
        if options:
            raise ConfigError("a Valkey backend has no options", remedy="leave them out")
        if certificates is not None and not _VALKEY[split.scheme]:
            raise ConfigError(
                f"{split.scheme}:// does not encrypt, and verifies nobody by {root_certificates}",
                remedy=f"use {split.scheme}s://, or leave it out",
            )
        return ValkeyBackend(
            _addresses(split),
            cluster=cluster,
            tls=_VALKEY[split.scheme],
            root_certificates=certificates,
            username=username,
            password=_password(password_file, password_env, environ),
            database=_database(split),
            patience_s=patience_s,
        )
    if split.scheme in _OBJECTS and split.netloc:
        if username or password_file or password_env or cluster is not None:
            raise ConfigError(
                f"user, password and cluster are settings of Valkey, not of {split.scheme}://",
                remedy="give credentials as options, or in the environment as for the store's own tools",
            )
        return ObjectBackend(url, options, root_certificates=certificates, patience_s=patience_s)
    raise ConfigError("the URL of the shared tier is not one", remedy=_FORMS)


def _split(url: str) -> SplitResult:
    try:
        split = urlsplit(url)
    except ValueError:
        raise ConfigError("the URL of the shared tier is not one", remedy=_FORMS) from None
    if "@" in url:
        raise ConfigError(
            "the URL of the shared tier holds a user or a password",
            remedy="give the user as a setting, and the password in a file or an environment variable",
        )
    if split.query or split.fragment:
        raise ConfigError("the URL of the shared tier has a query or a fragment", remedy=_FORMS)
    return split


def _addresses(split: SplitResult) -> list[tuple[str, int]]:
    addresses = []
    for part in split.netloc.split(","):
        try:
            one = urlsplit(f"//{part}")
            host, port = one.hostname, one.port or _PORT
        except ValueError:
            host, port = None, 0
        if not host:
            raise ConfigError(f"{part!r} in the URL of the shared tier is not host:port", remedy=_FORMS)
        addresses.append((host, port))
    return addresses


def _database(split: SplitResult) -> int:
    path = split.path.strip("/")
    if path and not path.isdecimal():
        raise ConfigError(f"{path!r} in the URL of the shared tier is not the number of a database", remedy=_FORMS)
    return int(path or 0)


def _password(file: Path | None, variable: str | None, environ: Mapping[str, str]) -> str | None:
    if file is not None and variable is not None:
        raise ConfigError("the shared tier's password is to come from a file and from a variable", remedy="name one")
    if variable is not None:
        if not environ.get(variable):
            raise ConfigError(f"the environment variable {variable} is not set", remedy="set it to the password")
        return environ[variable]
    if file is None:
        return None
    try:
        password = _read(file).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password:
        raise ConfigError(f"{file} holds no password", remedy="write the password into it, as one line")
    return password


def _certificates(path: Path) -> bytes:
    found = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{path} holds no certificate that can be read", remedy="give the authority's certificate as PEM"
        ) from None
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check path and permissions") from None
