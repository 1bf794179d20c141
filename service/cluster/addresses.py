"""Where peers are: names become addresses, all of them, again every few seconds."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Address", "Peer"]

log = logging.getLogger(__name__)

KEEP_S = 5.0
"""For so long a name means the same addresses; older ones are used while it is looked up again."""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a peer.

    Attributes
    ----------
    url
        With a numeric host: what is connected to.
    authority
        Name and port it is called by, in ``Host``.
    name
        The name in its certificate, with TLS.
    """

    url: str
    authority: str
    name: str


class Peer:
    """One entry of `cluster.peers`. Belongs to the event loop.

    Parameters
    ----------
    url
        ``http://`` or ``https://``, a name or an address, perhaps a port.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._scheme, self._authority = parts.scheme, parts.netloc
        self._name = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._known: tuple[Address, ...] = ()
        self._looked_up = -KEEP_S
        self._lookup: asyncio.Task[None] | None = None

    @property
    def known(self) -> tuple[Address, ...]:
        """Its addresses as of the last time anybody looked; does not wait."""
        return self._known

    async def addresses(self) -> tuple[Address, ...]:
        """Return its addresses; none for a name that means nothing. Waits only while none are known."""
        if self._lookup is None and asyncio.get_running_loop().time() - self._looked_up >= KEEP_S:
            self._lookup = asyncio.create_task(self._look_up())
        if self._lookup is not None and not self._known:
            await asyncio.shield(self._lookup)  # others wait for it too
        return self._known

    def close(self) -> None:
        """Stop looking."""
        if self._lookup is not None:
            self._lookup.cancel()

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
            self._known = tuple(dict.fromkeys(self._address(str(where[0])) for *_, where in found))
        except OSError as error:  # what was known may still be right
            log.info("a peer's name means no address", extra={"peer": self.url, "detail": str(error)})
        finally:
            self._looked_up = loop.time()
            self._lookup = None

    def _address(self, host: str) -> Address:
        numeric = f"[{host}]" if ":" in host else host
        return Address(f"{self._scheme}://{numeric}:{self._port}", self._authority, self._name)
