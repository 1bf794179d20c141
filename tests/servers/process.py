"""A server process: started, waited for, stopped and killed by its own id."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Server", "ServerProcess", "free_port", "mortal", "program", "wait_until"]

_PATIENCE_S = 60.0
_PORTS = range(12_000, 22_000)
"""Below those that the kernel gives to whoever connects: nobody takes one by chance before a server is at it."""


def program(name: str) -> str | None:
    """Return the path of a server program, beside this Python or on the PATH; None where there is none."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def mortal(command: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command, to be run so that what it starts gets a signal when the thread that starts it is gone.

    Start it on the main thread: then that is when this process is gone, however it ended.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", number.name.removeprefix("SIG"), *command] if setpriv else list(command)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now, and the port 10,000 above it too: servers take that for their own talk."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind((host, port))
            second.bind((host, port + 10_000))
            return port


def wait_until(ready: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Ask again and again until it is so; fail when it takes too long."""
    deadline = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} is not ready after {patience_s} s")
        time.sleep(0.02)


class ServerProcess:
    """One server. What it says goes to a file in its directory."""

    def __init__(self, command: Sequence[str], directory: Path, *, log: str) -> None:
        self.command = list(command)
        self.directory = directory
        self.log = directory / log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                mortal(self.command, signal.SIGKILL),  # also if it is frozen, and it keeps nothing
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """End it, gently if that works."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class Server:
    """What a test may do to a server, whichever it is: its class starts `_process`."""

    _process: ServerProcess

    @property
    def running(self) -> bool:
        return self._process.running

    def kill(self) -> None:
        self._process.kill()

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()

    def stop(self) -> None:
        self._process.stop()
