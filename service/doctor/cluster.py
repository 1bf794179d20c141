"""The shared tier's engine and the other nodes: are they there, and do they take this node's word?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tierkv.config import Config
from tierkv.core.build import read_secret, shared_store
from tierkv.errors import StorageFull, TierKVError
from tierkv.service.cluster.peers import Answer, Peers
from tierkv.service.doctor.finding import Finding, fail, ok, warn
from tierkv.service.status import in_units
from tierkv.storage.shared import SharedStore
from tierkv.storage.tier import BlockMeta, checksum

__all__ = ["check"]

_WAIT_S = 2.0
_LOOKS = 3
_NOBODYS = "0" * 64
"""A namespace that no node has: one that takes our word says so."""
_TRIAL = BlockMeta(64, checksum(bytes(64)), namespace=bytes(32), tenant=b"doctor--")
"""A block of no tenant, and of no namespace that there can be."""
_REMEDIES = {
    "refused": "give all nodes the same secret, compare its fingerprint, and synchronise their clocks",
    "down": "start them, or correct cluster.peers; requests go on without them",
    "late": "look at their load and the network between; requests go on without them",
}


def check(config: Config) -> Iterator[Finding]:
    """Check what this daemon shares with others."""
    yield from _shared(config)
    yield from _peers(config)


def _shared(config: Config) -> Iterator[Finding]:
    if config.shared.url is None:
        yield ok("shared", "no shared tier is configured")
        return
    store: SharedStore | None = None
    try:
        store = shared_store(config.model_copy(update={"state_dir": None}))  # what is kept there is the daemon's
        assert store is not None
        with _unlogged():
            store.open()
            findings = [*_engine(store, config.shared.probe_timeout), _trial(store)]
        yield from findings
    except TierKVError as error:
        yield fail("shared", error.message, error.remedy or "correct the section shared")
    finally:
        if store is not None:
            store.close()


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what the shared tier would log to itself: it is told as a finding."""
    logger = logging.getLogger("tierkv.storage.shared")
    nowhere, propagates = logging.NullHandler(), logger.propagate
    logger.addHandler(nowhere)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(nowhere)


def _engine(store: SharedStore, probe_timeout_s: float) -> Iterator[Finding]:
    store.check()  # connects first
    took_s = float("inf")
    for _ in range(_LOOKS):
        began = time.perf_counter()
        capacity = store.check()
        took_s = min(took_s, time.perf_counter() - began)
    told = f"answers in {took_s * 1e3:.1f} ms"
    if took_s > probe_timeout_s / 2:
        yield warn("shared", f"{told}, and requests wait {probe_timeout_s * 1e3:.0f} ms", "raise shared.probe_timeout")
    else:
        yield ok("shared", told)
    room = f"{in_units(capacity.used_bytes)} used of " + (
        in_units(capacity.capacity_bytes) if capacity.capacity_bytes else "what has no bound"
    )
    if capacity.warnings:
        yield warn("shared-engine", f"{room}; {'; '.join(capacity.warnings)}", "docs/cluster.md says how to set it up")
    else:
        yield ok("shared-engine", room)


def _trial(store: SharedStore) -> Finding:
    """Do once what daemons do: a server may answer, and not know or not allow a command."""
    area, key = store.area(_TRIAL.tenant, _TRIAL.namespace), secrets.token_bytes(32)
    try:
        area.put(key, bytes(_TRIAL.length), _TRIAL)
        area.read_into(key, memoryview(bytearray(_TRIAL.length)))
        area.meta(key)
        area.claim(key, 1.0)
        area.unclaim(key)
        area.delete(key)
    except StorageFull as error:
        return fail("shared-trial", error.message, error.remedy)
    except TierKVError as error:
        return fail(
            "shared-trial", error.message, "use a Valkey, or a Redis from 7 on; docs/cluster.md lists its commands"
        )
    return ok("shared-trial", "a block was written, read, claimed and removed")


def _peers(config: Config) -> Iterator[Finding]:
    if not config.cluster.peers:
        return
    if config.port is None:
        told = "there is no port: this node asks the others, and they cannot ask it"
        yield warn("cluster-port", told, "set port, and host to an address that the other nodes reach")
    path = config.secret or (config.state_dir or Path()) / "secret"
    try:
        answers = asyncio.run(_ask(config, read_secret(path)))
    except TierKVError as error:
        yield fail("peers", f"they cannot be asked: {error.message}", "give this node the secret that they have")
        return
    by_error: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        by_error[answer.error or ""].append(answer.url)
    wrong = {error: urls for error, urls in by_error.items() if error in _REMEDIES}
    good = len(answers) - sum(map(len, wrong.values()))
    told = "; ".join([f"{good} of {len(answers)} answer", *(f"{error}: {', '.join(wrong[error])}" for error in wrong)])
    if not wrong:
        yield ok("peers", told)
    else:
        worst = min(wrong, key=list(_REMEDIES).index)
        yield (fail if worst == "refused" else warn)("peers", told, _REMEDIES[worst])


async def _ask(config: Config, secret: bytes) -> list[Answer]:
    async with Peers(config, secret) as peers:
        return await peers.ask("default", _NOBODYS, (), _WAIT_S)
