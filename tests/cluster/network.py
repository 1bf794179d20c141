"""A network of namespaces on one bridge, whose links can be cut, delayed and made lossy."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import cable

__all__ = ["Host", "Network", "missing_network"]

_UPLINK = "up0"
_NAME = re.compile(r"tkv([0-9a-f]+)n[0-9a-f]+")
_numbers = itertools.count()


def missing_network() -> str:
    """Say why there can be no such network here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip (apt install iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun, for cables between network namespaces"
    try:
        with Network() as network:
            network.host("probe")
    except subprocess.CalledProcessError as error:
        return f"there can be no network namespaces here: {(error.stderr or '').strip()}"
    return ""


class Network:
    """A bridge in this namespace, at `address`, and hosts in namespaces of their own. All is gone when it is left."""

    def __init__(self) -> None:
        self._name = f"tkv{os.getpid():x}n{next(_numbers):x}"
        self._net = _unused_net()
        self._free = self._net.hosts()
        self.address = str(next(self._free))
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        _sweep()
        try:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("addr", "add", f"{self.address}/{self._net.prefixlen}", "dev", self._name)
            _ip("link", "set", self._name, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def host(self, name: str) -> Host:
        """Add a host that reaches `address` and all other hosts."""
        port = f"{self._name}{len(self._hosts):x}"
        host = Host(f"{self._name}-{name}", port, str(next(self._free)))
        self._hosts.append(host)
        uplink = host.cable(f"{port}u")
        _ip("netns", "add", host.namespace)
        _ip("link", "set", port, "master", self._name, "up")
        _ip("link", "set", uplink, "netns", host.namespace, "name", _UPLINK)
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/{self._net.prefixlen}", "dev", _UPLINK)
        _ip("-n", host.namespace, "link", "set", _UPLINK, "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        return host

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._name)


class Host:
    """One namespace. `port` is its end of the cable at the bridge."""

    def __init__(self, namespace: str, port: str, address: str) -> None:
        self.namespace = namespace
        self.port = port
        self.address = address
        self._cable: subprocess.Popen[bytes] | None = None

    def cable(self, end: str) -> str:
        """Lay the cable; return the name of its end at the host."""
        command = [sys.executable, str(Path(cable.__file__)), self.port, end]
        self._cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._cable.stdout is not None
        if self._cable.stdout.readline() != b"ready\n":
            raise subprocess.CalledProcessError(self._cable.wait(), command, stderr="no TAP interfaces")
        return end

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` there: the process that is started becomes theirs."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def unplug(self) -> None:
        """Pull the plug. Nothing tells those who talk: their connections stay open and silent."""
        _ip("link", "set", self.port, "down")

    def plug(self) -> None:
        _ip("link", "set", self.port, "up")

    def limit(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Make every packet, to it and from it, take so long, or be lost with a probability."""
        assert self._cable is not None
        assert self._cable.stdin is not None
        self._cable.stdin.write(f"{delay_s} {loss}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.namespace)
        if self._cable is not None:
            for stream in (self._cable.stdin, self._cable.stdout):
                assert stream is not None
                stream.close()
            self._cable.wait()


def _sweep() -> None:
    """Remove what processes have left that were killed in the middle of it. Their daemons have died with them."""
    for line in _ip("netns", "list").splitlines():
        if _abandoned(name := line.split()[0]):
            _ip("netns", "del", name)
    for line in _ip("-o", "link", "show", "type", "bridge").splitlines():
        if _abandoned(name := line.split(": ")[1]):
            _ip("link", "del", name)


def _abandoned(name: str) -> bool:
    found = _NAME.match(name)
    return found is not None and not Path(f"/proc/{int(found[1], 16)}").exists()


def _unused_net() -> ipaddress.IPv4Network:
    used = _ip("-4", "-o", "addr")
    return next(net for net in _random_nets() if f" {str(net).rpartition('.')[0]}." not in used)


def _random_nets() -> Iterator[ipaddress.IPv4Network]:
    while True:
        yield ipaddress.IPv4Network(f"10.{random.randrange(64, 128)}.{random.randrange(256)}.0/24")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
