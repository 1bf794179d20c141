"""Redis servers, single and as a cluster, spoken to by their own command-line client."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

from tests.servers.certificates import Certificate
from tests.servers.process import Server, ServerProcess, free_port, program, wait_until

__all__ = ["MISSING_REDIS", "RedisCluster", "RedisServer"]

MISSING_REDIS = (
    ""
    if program("redis-server") and program("redis-cli") and find_spec("glide")
    else "needs redis-server and valkey-glide (apt install redis-server; pip install 'tierkv-cache[shared]')"
)
_SLOTS = 16_384


class RedisServer(Server):
    """One server that keeps nothing on disk. `options` are arguments such as ``--maxmemory 8mb``.

    With a certificate it speaks TLS, and nothing else.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        port: int | None = None,
        host: str = "127.0.0.1",
        certificate: Certificate | None = None,
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self._certificate = certificate
        command = [program("redis-server") or "redis-server", "--bind", self.host]
        command += ["--port", str(self.port)] if certificate is None else _tls(certificate, self.port)
        command += ["--save", "", "--appendonly", "no", "--dir", str(directory), *options]
        self._process = ServerProcess(command, directory, log=f"redis-{self.port}.log")
        self.start()

    @property
    def url(self) -> str:
        return f"valkey{'' if self._certificate is None else 's'}://{self.host}:{self.port}"

    def start(self) -> None:
        self._process.start()
        wait_until(lambda: self.running and self._ask("PING").stdout.strip() in ("PONG", _NO_AUTH), "redis-server")

    def tell(self, *words: str) -> str:
        """Run a command and return the answer."""
        done = self._ask(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        client = program("redis-cli") or "redis-cli"
        command = [client, "-h", self.host, "-p", str(self.port)]
        if self._certificate is not None:
            command += ["--tls", "--insecure", "--cert", str(self._certificate.certificate)]
            command += ["--key", str(self._certificate.key)]
        command += words
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


_NO_AUTH = "NOAUTH Authentication required."


def _tls(certificate: Certificate, port: int) -> list[str]:
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate.certificate), "--tls-key-file", str(certificate.key)]
    return [*options, "--tls-ca-cert-file", str(certificate.authority)]


class RedisCluster:
    """A cluster of primaries that share the slots, without replicas."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *options: str,
        host: str = "127.0.0.1",
        certificate: Certificate | None = None,
    ) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for _ in range(nodes):
                port = free_port()
                own = ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf", *options]
                own += ["--tls-cluster", "yes"] if certificate is not None else []
                self.nodes.append(RedisServer(directory, *own, port=port, host=host, certificate=certificate))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        scheme = self.nodes[0].url.partition("://")[0]
        return f"{scheme}://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    def tell(self, *words: str) -> list[str]:
        """Run a command on every node."""
        return [node.tell(*words) for node in self.nodes]

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _join(self) -> None:
        first, share = self.nodes[0], _SLOTS // len(self.nodes)
        for number, node in enumerate(self.nodes):
            end = _SLOTS if number == len(self.nodes) - 1 else (number + 1) * share
            node.tell("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(end - 1))
            node.tell("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for node in self.nodes[1:]:
            node.tell("CLUSTER", "MEET", first.host, str(first.port))
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until all nodes know each other and serve all slots."""
        size = f"cluster_known_nodes:{len(self.nodes)}"
        for node in self.nodes:
            wait_until(
                lambda node=node: {"cluster_state:ok", size} <= set(node.tell("CLUSTER", "INFO").split()),  # type: ignore[misc]
                "a Redis cluster",
            )
