"""A real daemon in a process of its own, and blocks to put into it."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any, Self

import numpy as np
import yaml

import tierkv
from tests.servers.process import mortal
from tierkv.cache import Cache, Chain
from tierkv.spec import KVGroup, KVSpec

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
SPEC = KVSpec("model", "weights", "float32", 16, (KVGroup((0, 1), "full", 2, 16),))
BLOCK_BYTES = SPEC.layout().nbytes
TIERS: Mapping[str, Any] = {"warm": {"capacity": "16MiB"}, "cold": {"capacity": "64MiB", "segment": "16MiB"}}


class Daemon:
    """Runs ``tierkv serve`` on a Unix socket and a free TCP port."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any] = TIERS, *, without: str = "", before: str = ""
    ) -> None:
        self.socket = directory / "s"
        self.state_dir = directory / "state"
        self.log_path = directory / "log"
        self.config_path = directory / "config.yaml"
        self.tcp_port = 0
        self.announced: list[str] = []
        self._without = without
        self._before = before
        self.process: subprocess.Popen[bytes] | None = None
        self.configure(settings)

    def configure(self, settings: Mapping[str, Any]) -> None:
        own = {"socket": str(self.socket), "port": 0, "state_dir": str(self.state_dir)}
        self.config_path.write_text(yaml.safe_dump({**own, **settings}))

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"http://127.0.0.1:{self.tcp_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def start(self) -> Self:
        """Start and wait until it says that it is ready."""
        script = self._before + _START
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                mortal([sys.executable, "-c", script, self._without, "serve", "--config", str(self.config_path)]),
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # select sees no lines that Python has buffered
                cwd=ROOT,
                start_new_session=True,
            )
        self.announced = []
        deadline = time.monotonic() + PATIENCE_S
        assert self.process.stdout is not None
        while len(self.announced) < 2:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = self.process.stdout.readline().decode() if ready else ""
            if not line:
                self.kill()
                raise AssertionError(f"the daemon did not start: {self.log}")
            self.announced.append(line.strip())
        self.tcp_port = int(self.announced[0].rpartition(":")[2])
        return self

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGKILL)
            self.wait()

    def destroy(self) -> None:
        """Kill it and remove what a killed daemon leaves in memory."""
        self.kill()
        for path in self.shared_files():
            path.unlink()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def connect(self, tenant: str = "default", *, tcp: bool = False, timeout_s: float = 5.0) -> Cache:
        cache = tierkv.connect(self.tcp_url if tcp else self.url, tenant=tenant, timeout_s=timeout_s)
        cache.register(SPEC)
        return cache

    def shared_files(self) -> list[Path]:
        """What this daemon has in /dev/shm."""
        from tierkv.core.build import _instance

        return list(Path("/dev/shm").glob(f"{_instance(self.state_dir)}.*"))


# The name of a package may be given that the daemon must find missing.
_START = """
import importlib.abc, sys
missing = sys.argv.pop(1)
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if missing and name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from tierkv.service.cli import main
main()
"""


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets wherever pytest keeps its own."""
    directory = Path(tempfile.mkdtemp(prefix="tierkv-test-"))
    try:
        yield directory
    finally:
        rmtree(directory, ignore_errors=True)


@contextmanager
def running(settings: Mapping[str, Any] = TIERS, *, without: str = "", before: str = "") -> Iterator[Daemon]:
    """A started daemon, dead at the end whatever happened to it. `before`: what its process does first, in Python."""
    with short_directory() as directory:
        daemon = Daemon(directory, settings, without=without, before=before)
        try:
            yield daemon.start()
        finally:
            daemon.destroy()


def chain(blocks: int, *, seed: int = 0, spec: KVSpec = SPEC) -> Chain:
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * spec.block_tokens)
    return Chain.of(spec, tokens)


def payload(of: Chain, index: int, length: int = BLOCK_BYTES) -> bytes:
    """The bytes a block of a chain has in these tests: its own, and no other's."""
    seed = int.from_bytes(of.hashes[index][:8], "little")
    return np.random.default_rng(seed).bytes(length)


def store(cache: Cache, of: Chain, *, start: int = 0) -> int:
    """Write and publish the missing blocks of a chain; return how many there were."""
    with cache.reserve(of, start=start) as write:
        for grant in write.granted:
            write.buffer(grant.index)[:] = payload(of, grant.index)
        return write.commit()


def read_back(cache: Cache, of: Chain, *, wait_s: float = 10.0) -> int:
    """Read and compare every hit block; return how many there were."""
    with cache.acquire(of, wait_s=wait_s) as read:
        for ref in read.blocks:
            assert bytes(read.view(ref.index)) == payload(of, ref.index)
        return read.hit_blocks


def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Poll something that another process is about to do."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Raw:
    """Plain HTTP requests with whatever headers and bodies a stranger may send."""

    def __init__(self, port: int) -> None:
        self._port = port

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any], http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            data = response.read()
            decoded = json.loads(data) if "json" in response.headers.get("Content-Type", "") else {"raw": data}
            return response.status, decoded, response
        finally:
            connection.close()

    def json(self, method: str, path: str, message: Any) -> tuple[int, dict[str, Any]]:
        body = json.dumps(message).encode()
        status, answer, _ = self.request(method, path, body, {"Content-Type": "application/json"})
        return status, answer


class PeakMemory:
    """How much memory a process takes at most, from now on, beyond what it has now; in bytes."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        match = re.search(rf"^{name}:\s+(\d+) kB", self._status.read_text(), re.MULTILINE)
        assert match is not None
        return int(match[1]) << 10


def mode(path: str | os.PathLike[str]) -> int:
    return os.stat(path).st_mode & 0o777
