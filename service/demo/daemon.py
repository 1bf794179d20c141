"""A daemon of the demo's own: a child process with a configuration, a log and tiers in one directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import yaml

import tierkv
from tierkv.cache import Cache
from tierkv.errors import Unavailable

__all__ = ["Daemon"]

START_S = 60.0
STOP_S = 60.0
_LOG_TAIL = 2000


class Daemon:
    """Runs ``tierkv serve`` until the context is left, however it is left.

    Parameters
    ----------
    directory
        An existing directory for the socket, the log, the state and the cold tier.
    tiers
        The ``hot``, ``warm`` and ``cold`` sections of the configuration; the cold path is set here.
    """

    def __init__(self, directory: Path, tiers: dict[str, dict[str, Any]]) -> None:
        self._socket = directory / "tierkv.sock"
        self._log = directory / "daemon.log"
        self._config = directory / "config.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        settings = {
            **tiers,
            "socket": str(self._socket),
            "state_dir": str(directory / "state"),
            "cold": {**tiers["cold"], "path": str(directory / "cold")},
        }
        self._config.write_text(yaml.safe_dump(settings), encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the running daemon, None when there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def connect(self, tenant: str) -> Cache:
        """Connect as a tenant. Raises `Unavailable`."""
        return tierkv.connect(self.url, tenant=tenant)

    def start(self) -> None:
        """Start the process and wait until it answers. Raises `Unavailable` with the end of its log if it does not."""
        command = [sys.executable, "-m", "tierkv.service", "serve", "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = self._spawn(command, log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.connect("probe").close()
                return
            except Unavailable:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise Unavailable(f"the daemon did not start: {self._tail()}", remedy="see its message") from None
                time.sleep(0.05)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Ask the process to flush and end (SIGTERM), and wait for it; kill it only if it does not. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @staticmethod
    def _spawn(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        # Settings of the user's own daemon would go before this one's file.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
        # A session of its own: Ctrl-C in the terminal is ours to handle, and the daemon is still told to flush.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip() or "it said nothing"
