"""The addresses: are the socket and the port free, or a tierkv's already?"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tierkv.client import connect
from tierkv.config import Config
from tierkv.errors import TierKVError
from tierkv.service.auth import Authority
from tierkv.service.doctor.finding import Finding, fail, ok, warn
from tierkv.service.tls import server_context

__all__ = ["check"]

_TIMEOUT_S = 2.0
_TAKEN = "stop it, or set another address"


def check(config: Config) -> Iterator[Finding]:
    """Check the addresses to listen on."""
    if config.socket is None and config.port is None:
        yield fail("address", "the daemon has no address", "set socket, or port for TCP on the loopback interface")
    if config.socket is not None:
        yield _socket(config.socket, config.state_dir)
    if config.port is not None:
        yield _port(config.host, config.port)
    try:
        encrypted = server_context(config.tls) is not None
    except TierKVError as error:
        yield fail("tls", error.message, error.remedy)
    else:
        if config.exposed and not encrypted:
            yield warn("tls", "tokens and blocks travel unencrypted over the network", "set tls")
    yield _tokens(config)


def _tokens(config: Config) -> Finding:
    try:
        required = Authority(config.state_dir).required
    except TierKVError as error:
        return fail("tokens", error.message, error.remedy)
    if config.exposed and not required:
        return fail("tokens", f"host {config.host} is open to others, and there are no tokens", "tierkv token new")
    return ok("tokens", "callers need one" if required else "none: whoever reaches an address may use it")


def _socket(path: Path, state_dir: Path | None) -> Finding:
    folder = path.parent
    if folder == state_dir and not folder.exists():
        return ok("socket", f"{path} is free")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return fail("socket", f"{folder} is not a directory this user can write to", "choose another socket path")
    if not path.exists():
        return ok("socket", f"{path} is free")
    if not path.is_socket():
        return fail("socket", f"{path} exists and is not a socket", "choose another socket path, or remove it")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return ok("socket", f"{path} was left by a dead process and will be replaced")
        except OSError as error:
            return fail("socket", f"{path} does not answer: {error}", _TAKEN)
    return _owner("socket", f"unix://{path.resolve()}")


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError:
            return fail("port", f"port {port} is for privileged processes", "set a port above 1023")
        except OSError:
            return _owner("port", f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return ok("port", f"{host}:{port} is free" if port else "a free one will be taken")


def _owner(check: str, url: str) -> Finding:
    try:
        connect(url, timeout_s=_TIMEOUT_S).close()
    except TierKVError:
        return fail(check, f"something that is no tierkv listens at {url}", _TAKEN)
    return ok(check, f"a tierkv daemon is running at {url}")
