"""Several daemons that have the same server secret and know each other."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.servers.process import free_port
from tests.service.daemon import PATIENCE_S, SPEC, TIERS, Daemon, Raw, short_directory, store
from tierkv.cache import Chain

SECRET = bytes(range(32))


@contextmanager
def node(
    name: str, peers: Sequence[str], *, port: int = 0, secret: bytes = SECRET, before: str = "", **more: Any
) -> Iterator[Daemon]:
    """A daemon that is not started yet, with its secret in place."""
    with short_directory() as directory:
        settings = {**TIERS, "port": port, "cluster": {"node": name, "peers": list(peers)}, **more}
        daemon = Daemon(directory, settings, before=before)
        daemon.state_dir.mkdir(mode=0o700)
        path = daemon.state_dir / "secret"
        path.write_bytes(secret)
        path.chmod(0o600)
        try:
            yield daemon
        finally:
            daemon.destroy()


@contextmanager
def cluster(count: int, *, stranger: int | None = None) -> Iterator[list[Daemon]]:
    """Started daemons n0, n1 ..., each of which has all of them as peers, itself too; one may have another secret."""
    ports = free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(node(f"n{at}", urls, port=port, secret=b"x" * 32 if at == stranger else SECRET))
            for at, port in enumerate(ports)
        ]
        for daemon in daemons:
            daemon.start()
            Raw(daemon.tcp_port).json("PUT", "/v1/namespaces", SPEC.to_dict())
        yield daemons


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens at, all different; they stay so unless somebody else wants just these."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port(host)] = None
    return list(ports)


def fill(daemon: Daemon, of: Chain, blocks: int, tenant: str = "default") -> None:
    with daemon.connect(tenant) as cache:
        store(cache, Chain(of.namespace, of.hashes[:blocks]))


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon as a client at a TCP address sees it."""

    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, message: Any) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request(method, path, json.dumps(message).encode(), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def where(self, of: Chain, wait_s: float = 20.0) -> list[dict[str, Any]]:
        message = {"hashes": [item.hex() for item in of.hashes], "wait_s": wait_s}
        status, answer = self.ask("POST", f"/v1/{of.namespace}/where", message)
        assert (status, answer["blocks"]) == (200, len(of)), answer
        found: list[dict[str, Any]] = answer["nodes"]
        return found


def where(daemon: Daemon, of: Chain, *, wait_s: float = 20.0, **headers: str) -> list[dict[str, Any]]:
    """What a node says of all; underscores in the names of headers are dashes."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return Side("127.0.0.1", daemon.tcp_port, given).where(of, wait_s)


def in_short(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, int, str | None]]:
    return [(entry["node"], entry["blocks"], entry["error"]) for entry in nodes]
