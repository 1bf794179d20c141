"""The same cache three ways: embedded, through a daemon and its shared memory, and through HTTP bodies.

A module that uses these fixtures says in `SETTINGS` what its cache looks like. There is one cache and one daemon a
module; tests keep out of each other's way by namespaces of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.servers.process import mortal
from tierkv.cache import Cache
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVSpec

from .support import make_spec


@dataclass(frozen=True)
class Deployment:
    """A running cache. `connect` gives another client; `local` one that maps the memory; `home` holds the cold tier."""

    kind: str
    connect: Callable[[str], Cache]
    local: Callable[[str], Cache]
    home: Path


def _settings(module: Any, home: Path) -> dict[str, Any]:
    return {"state_dir": str(home / "state"), **module.SETTINGS}


@pytest.fixture(scope="module")
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], Path]]:
    """Addresses of a daemon in a process of its own, and where its state is."""
    home = tmp_path_factory.mktemp("daemon")
    config = home / "config.yaml"  # JSON is YAML
    config.write_text(json.dumps({**_settings(request.module, home), "socket": str(home / "s"), "port": 0}))
    process = subprocess.Popen(
        mortal([sys.executable, "-m", "tierkv.service", "serve", "-c", str(config)]), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if "ready" in line), "")
        yield re.findall(r"(?:unix|http)://[^\s,]+", ready), home
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.fixture(scope="module", params=["embedded", "socket", "tcp"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if request.param == "embedded":
        home = tmp_path_factory.mktemp("embedded")
        with tierkv.open(_settings(request.module, home)) as cache:
            assert isinstance(cache, EmbeddedCache)
            yield Deployment("embedded", cache.for_tenant, cache.for_tenant, home)
        return
    (socket, tcp), home = request.getfixturevalue("daemon")
    with contextlib.ExitStack() as stack:

        def at(url: str) -> Callable[[str], Cache]:
            return lambda tenant: stack.enter_context(tierkv.connect(url, tenant=tenant, timeout_s=30.0))

        yield Deployment(request.param, at(socket if request.param == "socket" else tcp), at(socket), home)


_tenants = itertools.count()


@pytest.fixture(scope="module")
def tenant() -> str:
    """One for all tests of a module: among several, each could count on a part of the memory only."""
    return f"tenant-{next(_tenants)}"


@pytest.fixture
def cache(deployment: Deployment, tenant: str) -> Cache:
    """A client of the module's tenant."""
    return deployment.connect(tenant)


@pytest.fixture
def peer(deployment: Deployment, tenant: str) -> Cache:
    """Another client of the same tenant."""
    return deployment.connect(tenant)


@pytest.fixture
def local(deployment: Deployment, tenant: str) -> Cache:
    """A client of the same tenant whose leases are on the cache's own memory."""
    return deployment.local(tenant)


@pytest.fixture
def spec(cache: Cache, peer: Cache, local: Cache) -> KVSpec:
    """A namespace of its own, registered by all clients."""
    spec = make_spec()
    for client in (cache, peer, local):
        client.register(spec)
    return spec
