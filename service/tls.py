"""TLS for the TCP port."""

from __future__ import annotations

import ssl

from tierkv.config import TLSConfig
from tierkv.errors import ConfigError

__all__ = ["server_context"]


def server_context(config: TLSConfig) -> ssl.SSLContext | None:
    """Load certificate and key, or return None where none are set. Raises `ConfigError`. Reads two files."""
    if config.certificate is None or config.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name, path in (("certificate", config.certificate), ("key", config.key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"tls.{name}: cannot read {path}: {error.strerror}", remedy="name a PEM file the daemon may read"
            ) from None
    try:
        context.load_cert_chain(config.certificate, config.key, password=_ask_nobody)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls: {config.certificate} and {config.key} are not a certificate and its key: {error.reason or error}",
            remedy="give both as PEM; the certificate first, then those it is signed with",
        ) from None
    return context


def _ask_nobody() -> str:
    raise ConfigError("tls.key is encrypted, and the daemon has nobody to ask", remedy="give it a key without one")
