"""SIGKILL at any moment: what was acknowledged is there, what is there verifies, nothing is left lying about."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.service.daemon import BLOCK_BYTES, Daemon, chain, payload, short_directory
from tests.torture.support import LONG, ROOT, block, disk_use, holds, say
from tierkv.cache import Cache, Chain
from tierkv.errors import TierKVError
from tierkv.storage.cold import ColdTier

TIER_KILLS = 150 if LONG else 4
DAEMON_KILLS = 50 if LONG else 2
SIZE = 20_000
CAPACITY = 24 << 20
DAEMON_CAPACITY = 64 << 20
NOT_YET_EVICTED = DAEMON_CAPACITY // 4 // (8 * BLOCK_BYTES)  # chains, the latest
SETTINGS: dict[str, Any] = {"capacity_bytes": CAPACITY, "segment_bytes": 3 << 20, "codec": "raw"}

# "+ n" is printed once block n was acknowledged, "x n" once it was evicted.
WRITER = """
import sys
from tests.torture.support import block, key_of, put
from tierkv.storage.cold import ColdTier

path, sync, number, size, capacity, segment = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
names = {key_of(n): n for n in range(number)}

def say(sign, numbers):
    print("".join(f"{sign} {n}\\n" for n in numbers), end="", flush=True)

tier = ColdTier(path, capacity_bytes=capacity, segment_bytes=segment, codec="raw", sync=sync, sync_interval_s=0.01,
                on_evict=lambda keys: say("x", [names[key] for key in keys]))
while True:
    batch = range(number, number + 1 + number % 6)
    names.update({key_of(n): n for n in batch})
    assert not put(tier, {n: block(n, size) for n in batch})
    say("+", batch)
    number = batch[-1] + 1
"""


def lines_until_killed(arguments: list[str], after_s: float) -> Iterator[str]:
    """Run the writer, kill it `after_s` seconds after its first line, and yield the whole lines it said."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    killer = threading.Timer(after_s, writer.kill)
    for line in writer.stdout:
        if killer.ident is None:
            killer.start()
        if line.endswith("\n"):
            yield line
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()


def test_a_killed_cold_tier_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    store = tmp_path / "cold"
    rng = random.Random(8)
    number = acknowledged = verified = most = 0
    expected: set[int] = set()
    for _ in range(TIER_KILLS):
        gone: set[int] = set()
        sync = rng.choice(["none", "interval", "commit"])
        arguments = [str(store), sync, *map(str, (number, SIZE, CAPACITY, SETTINGS["segment_bytes"]))]
        for line in lines_until_killed(arguments, rng.uniform(0.0, 0.3)):
            sign, name = line.split()
            number = max(number, int(name) + 1)
            acknowledged += sign == "+"
            (expected if sign == "+" else gone).add(int(name))
        most = max(most, disk_use(store))
        with closing(ColdTier(store, sync="none", **SETTINGS)) as tier:
            assert tier.damage == {}
            there = {n for n in range(max(0, number - 2000), number + 10) if holds(tier, n, block(n, SIZE))}
            assert tier.usage().blocks == len(there)
        assert not there & gone
        # A kill between an eviction and its report hides that report: of the oldest, and of one segment at most.
        missing = sorted(expected - gone - there)
        assert len(missing) <= SETTINGS["segment_bytes"] // SIZE + 1
        assert not missing or missing[-1] < min(there)
        verified += len(there)
        expected = there
        number += 10
    assert most <= CAPACITY
    say(
        f"cold tier: {TIER_KILLS} kills, {acknowledged} blocks acknowledged, {verified} verified after restarts, "
        f"at most {most / CAPACITY:.3f} of the capacity on disk"
    )


class Storing:
    """A client that stores chains until its daemon is gone."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._seed = seed
        self.stored: list[Chain] = []
        self.flushed: list[Chain] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60.0)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        try:
            with self._daemon.connect(timeout_s=5.0) as cache:
                while True:
                    new = chain(8, seed=self._seed)
                    self._seed += 1
                    if store(cache, new) == len(new):
                        self.stored.append(new)
                    if self._seed % 7 == 0:
                        cache.flush()
                        self.flushed = list(self.stored)
        except TierKVError:
            return


def store(cache: Cache, of: Chain) -> int:
    with cache.reserve(of) as write:
        for grant in write.granted:
            write.buffer(grant.index)[:] = payload(of, grant.index)
        return write.commit()


def verified_blocks(cache: Cache, of: Chain) -> int:
    with cache.acquire(of, wait_s=30.0) as read:
        assert read.hit_blocks == read.published_blocks, "every block said to be there can be read"
        for ref in read.blocks:
            assert bytes(read.view(ref.index)) == payload(of, ref.index)
        return read.hit_blocks


def test_a_killed_daemon_loses_what_was_in_memory_only() -> None:
    settings = {
        "warm": {"capacity": "16MiB", "demote_ahead": 1.0},
        "cold": {"capacity": DAEMON_CAPACITY, "segment": "16MiB", "codec": "raw"},
    }
    rng = random.Random(9)
    kept: list[Chain] = []
    acknowledged = verified = lost = most = 0
    with short_directory() as home:
        daemon = Daemon(home, settings)
        try:
            daemon.start()
            for turn in range(DAEMON_KILLS):
                client = Storing(daemon, turn * 100_000)
                _pause(rng.uniform(0.1, 0.6))
                daemon.kill()
                client.join()
                most = max(most, disk_use(daemon.state_dir / "cold"))
                daemon.start()
                with daemon.connect(timeout_s=30.0) as cache:
                    assert cache.stats()["tiers"]["cold"]["damage"] == {}
                    for one in (kept + client.flushed)[-NOT_YET_EVICTED:]:
                        assert verified_blocks(cache, one) == len(one), "what was flushed, or survived before, is there"
                    late = client.stored[len(client.flushed) :]
                    found = [verified_blocks(cache, one) for one in late]
                    kept += client.flushed + [one for one, blocks in zip(late, found, strict=True) if blocks == 8]
                    acknowledged += 8 * len(client.stored)
                    verified += 8 * len(client.flushed) + sum(found)
                    lost += 8 * len(late) - sum(found)
                    assert cache.stats()["counters"]["corrupt_blocks"] == {}
                    assert cache.stats()["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}
            assert daemon.stop() == 0
            assert not daemon.shared_files()
            assert "Traceback" not in daemon.log
        finally:
            daemon.destroy()
    assert most <= DAEMON_CAPACITY
    say(
        f"daemon: {DAEMON_KILLS} kills, {acknowledged} blocks acknowledged, {verified} verified after restarts, {lost} "
        f"were in memory only, at most {most / DAEMON_CAPACITY:.3f} of the capacity on disk"
    )


def _pause(seconds: float) -> None:
    """Let the client get on: the moment of the kill is what is random here, nothing waits for anything."""
    time.sleep(seconds)
