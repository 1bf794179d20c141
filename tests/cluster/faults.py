"""What can happen to machines that share blocks, each as something that begins and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.cluster.network import Network
from tests.cluster.node import Node
from tests.servers.redis import RedisCluster

__all__ = ["FAULTS", "Cluster", "Fault", "running_cluster"]

_USER, _PASSWORD = "tierkv", "not-a-secret"
_ROOM = "256mb"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two nodes and the servers that they share blocks through.

    Attributes
    ----------
    access
        What a node needs in its ``shared`` section to be let in by the servers.
    """

    network: Network
    servers: RedisCluster
    access: Mapping[str, str]
    nodes: tuple[Node, Node]


class Fault(Protocol):
    """Something that lasts while its context does."""

    def __call__(self, cluster: Cluster, /) -> AbstractContextManager[None]: ...


@contextmanager
def running_cluster(home: Path, **settings: object) -> Iterator[Cluster]:
    """Two started nodes at three servers. `home`: a directory with a short path."""
    with Network() as network:
        options = ("--protected-mode", "no", "--cluster-node-timeout", "2000", "--maxmemory", _ROOM)
        servers = RedisCluster(home, 3, *options, "--maxmemory-policy", "allkeys-lru", host=network.address)
        nodes: list[Node] = []
        try:
            _grant(servers)
            password = home / "password"
            password.write_text(_PASSWORD)
            password.chmod(0o600)
            access = {"user": _USER, "password_file": str(password)}
            for name in ("a", "b"):
                nodes.append(Node(home, name, network.host(name), servers.url, shared=access, settings=settings))
                nodes[-1].start()
            yield Cluster(network, servers, access, (nodes[0], nodes[1]))
        finally:
            for node in nodes:
                node.kill()
            servers.stop()


def _grant(servers: RedisCluster) -> None:
    servers.tell("ACL", "SETUSER", _USER, "reset", "on", f">{_PASSWORD}", "~*", "&*", "+@all")


@contextmanager
def one_server_killed(cluster: Cluster) -> Iterator[None]:
    """A third of the slots is lost with its blocks, and there are no replicas: all stands still until it is back."""
    server = cluster.servers.nodes[0]
    server.kill()
    yield
    server.start()
    _grant(cluster.servers)
    cluster.servers.await_ready()


@contextmanager
def restarted_empty(cluster: Cluster) -> Iterator[None]:
    """All blocks are lost, and what the nodes agreed on."""
    for server in cluster.servers.nodes:
        server.kill()
    for server in cluster.servers.nodes:
        server.start()
    _grant(cluster.servers)
    cluster.servers.await_ready()
    yield


@contextmanager
def unplugged(cluster: Cluster) -> Iterator[None]:
    """One node is cut off; nothing tells it."""
    host = cluster.nodes[1].host
    host.unplug()
    yield
    host.plug()


def _limited(*, delay_s: float = 0.0, loss: float = 0.0) -> Fault:
    @contextmanager
    def fault(cluster: Cluster) -> Iterator[None]:
        for node in cluster.nodes:
            node.host.limit(delay_s=delay_s, loss=loss)
        yield
        for node in cluster.nodes:
            node.host.limit()

    return fault


@contextmanager
def full(cluster: Cluster) -> Iterator[None]:
    """The servers take no more blocks."""
    cluster.servers.tell("CONFIG", "SET", "maxmemory-policy", "noeviction")
    cluster.servers.tell("CONFIG", "SET", "maxmemory", "1mb")
    yield
    cluster.servers.tell("CONFIG", "SET", "maxmemory", _ROOM)
    cluster.servers.tell("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


@contextmanager
def frozen(cluster: Cluster) -> Iterator[None]:
    """The servers accept connections and answer nothing."""
    for server in cluster.servers.nodes:
        server.freeze()
    yield
    for server in cluster.servers.nodes:
        server.thaw()
    cluster.servers.await_ready()


@contextmanager
def revoked(cluster: Cluster) -> Iterator[None]:
    """The nodes are shown the door and not let in again."""
    cluster.servers.tell("ACL", "SETUSER", _USER, "off")
    cluster.servers.tell("CLIENT", "KILL", "USER", _USER)
    yield
    _grant(cluster.servers)


@contextmanager
def forbidden(cluster: Cluster) -> Iterator[None]:
    """The nodes are let in, and may do nothing."""
    cluster.servers.tell("ACL", "SETUSER", _USER, "-@all")
    yield
    _grant(cluster.servers)


FAULTS: Mapping[str, Fault] = {
    "a server killed": one_server_killed,
    "a node cut off": unplugged,
    "all packets lost": _limited(loss=1.0),
    "round trip of 40 ms": _limited(delay_s=0.02),
    "round trip of 400 ms": _limited(delay_s=0.2),
    "5 % of packets lost": _limited(loss=0.05),
    "servers full": full,
    "servers frozen": frozen,
    "restarted empty": restarted_empty,
    "credentials revoked": revoked,
    "permissions revoked": forbidden,
}
