"""A writer that is frozen past its lease, its quarantine and the reuse of its slots, and then writes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.service import daemon as daemons
from tests.service.daemon import Daemon, chain, eventually, payload, running, store
from tests.torture.support import LONG, ROOT, say
from tierkv.cache import Cache, Chain
from tierkv.errors import CorruptBlock

FROZEN = 48  # blocks of 128 that fit
ROUNDS = 20 if LONG else 1

# Takes slots, freezes itself, and on waking writes into them again and again before it asks whether it may.
WRITER = """
import os, signal, sys
from tests.service.daemon import SPEC, chain
import tierkv
from tierkv.errors import LeaseLost

with tierkv.connect(sys.argv[1]) as cache:
    cache.register(SPEC)
    lease = cache.reserve(chain(int(sys.argv[2]), seed=int(sys.argv[3])), ttl_s=0.2)
    views = [lease.buffer(grant.index) for grant in lease.granted]
    print(len(views), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    for turn in range(50):
        for view in views:
            view[:] = bytes([turn]) * len(view)
        if turn == 0:
            print("scribbling", flush=True)
    try:
        lease.commit()
    except LeaseLost:
        print("lost", flush=True)
"""


@pytest.fixture(params=[0.1, 60.0], ids=["reused", "quarantined"])
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon whose quarantine is over before the writer wakes, and one whose is not."""
    hurry = f"import tierkv.core.engine\ntierkv.core.engine.QUARANTINE_S = {request.param}\n"
    monkeypatch.setattr(daemons, "_START", hurry + daemons._START)
    with running({"warm": {"capacity": "1MiB"}, "cold": {"capacity": 0}}) as daemon:
        daemon.quarantine_s = request.param  # type: ignore[attr-defined]
        yield daemon


def freeze_writer(daemon: Daemon, seed: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, daemon.url, str(FROZEN), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert int(writer.stdout.readline()) == FROZEN
    assert os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT) is not None
    return writer


def read_all(cache: Cache, chains: list[Chain]) -> tuple[int, int]:
    """Read what is there; return how many blocks were right and how many were found damaged. None may be wrong.

    By verified copy. A view in place is verified when it is given; only the quarantine protects it afterwards.
    """
    good = bad = 0
    for one in chains:
        with cache.acquire(one, wait_s=0.0) as read:
            for ref in read.blocks:
                out = bytearray(ref.length)
                try:
                    read.read_into(ref.index, memoryview(out))
                except CorruptBlock:
                    bad += 1
                else:
                    assert out == payload(one, ref.index)
                    good += 1
    return good, bad


def test_a_writer_that_wakes_too_late_harms_nobody(daemon: Daemon) -> None:
    reused = daemon.quarantine_s < 1  # type: ignore[attr-defined]
    found = [0, 0]
    for turn in range(ROUNDS if reused else 1):
        with daemon.connect(timeout_s=30.0) as cache:
            writer = freeze_writer(daemon, seed=1000 + turn)
            try:
                eventually(lambda: cache.stats()["leases"]["write"] == 0)
                eventually(lambda: cache.stats()["quarantined_slots"] == (0 if reused else FROZEN))
                chains = [chain(32, seed=10 * turn + n) for n in range(4)]  # as many blocks as memory has
                for one in chains:
                    store(cache, one)
                writer.send_signal(signal.SIGCONT)
                assert writer.stdout is not None
                assert writer.stdout.readline() == "scribbling\n"
                while writer.poll() is None:
                    for count, more in enumerate(read_all(cache, chains)):
                        found[count] += more
                assert writer.stdout.readline() == "lost\n"
                good, bad = read_all(cache, chains)
                found[1] += bad
                assert bad == 0 or reused
                assert good > 0
            finally:
                writer.kill()
                writer.wait()
                if writer.stdout is not None:
                    writer.stdout.close()
            corrupt = cache.stats()["counters"]["corrupt_blocks"]
            assert (corrupt != {}) == (reused and found[1] > 0)
            assert cache.lookup(chain(FROZEN, seed=1000 + turn)).blocks == 0, "what it wrote is published to nobody"
            for one in chains:
                cache.delete(one)
                store(cache, one)
            assert read_all(cache, chains)[1] == 0, "the next store repairs what was damaged"
    if reused:
        assert found[1] > 0, "the slots were reused: the test would not notice if nobody checked"
        say(f"{ROUNDS} frozen writers woke into reused slots: {found[0]} reads verified, {found[1]} found the damage")
