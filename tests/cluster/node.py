"""One machine of a cluster: a daemon in a network namespace, reached over its Unix socket."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import tierkv
from tests.cluster.network import Host
from tests.servers.process import mortal, wait_until
from tierkv.cache import Cache
from tierkv.core.build import _instance
from tierkv.spec import KVSpec

__all__ = ["PROBE_S", "SYNC_S", "Node"]

ROOT = Path(__file__).parents[2]
PROBE_S = 0.2
SYNC_S = 0.1
_PATIENCE_S = 60.0


class Node:
    """Runs ``tierkv serve``, with a warm tier only unless `settings` say otherwise.

    Parameters
    ----------
    home
        A directory that the nodes of a cluster have in common; its path must be short, for Unix sockets.
    url
        The shared tier's.
    shared, settings
        Further settings of its section, and of the whole configuration.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        host: Host,
        url: str,
        *,
        shared: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self._socket = home / f"{name}.s"
        self._state = home / name
        self._log = home / f"{name}.log"
        self._config = home / f"{name}.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        secret = home / "secret"
        if not secret.exists():
            secret.write_bytes(os.urandom(32))
            secret.chmod(0o600)
        sections = {
            "socket": str(self._socket),
            "state_dir": str(self._state),
            "secret": str(secret),
            "warm": {"capacity": "128MiB"},
            "cold": {"capacity": 0},
            "cluster": {"node": name},
            "shared": {"url": url, "write": "all", "probe_timeout": PROBE_S, "sync": SYNC_S, **(shared or {})},
            **(settings or {}),
        }
        self._config.write_text(yaml.safe_dump(sections))

    def start(self, patience_s: float = _PATIENCE_S) -> None:
        """Start and wait until it serves."""
        command = self.host.command(sys.executable, "-m", "tierkv.service", "serve", "-c", str(self._config))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                mortal(command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._serves, f"node {self.name}", patience_s)

    def stop(self, patience_s: float = _PATIENCE_S) -> int:
        """SIGTERM; return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(patience_s)

    def kill(self) -> None:
        """SIGKILL, and remove what that leaves in shared memory."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
        for path in Path("/dev/shm").glob(f"{_instance(self._state)}.*"):
            path.unlink()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def connect(self, *specs: KVSpec) -> Cache:
        """A new client."""
        cache = tierkv.connect(f"unix://{self._socket}", timeout_s=10.0)
        for spec in specs:
            cache.register(spec)
        return cache

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def threads(self) -> int:
        """How many threads the daemon has."""
        assert self._process is not None
        return len(os.listdir(f"/proc/{self._process.pid}/task"))

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's values over all its labels, or over those of which one has the value `label`."""
        _, body = self._get("/metrics")
        assert f"# TYPE {name.removesuffix('_total')}" in body, f"there is no metric {name}"
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", body, re.MULTILINE)
        return sum(float(value) for labels, value in found if not label or f'"{label}"' in labels)

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            return self._get("/healthz")[0] == 200
        except OSError:
            return False

    def _get(self, path: str) -> tuple[int, str]:
        connection = _Connection(self._socket)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
