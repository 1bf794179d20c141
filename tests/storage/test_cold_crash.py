"""The cold tier under SIGKILL: whatever was acknowledged is there, whatever is there verifies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.tier_suite import block, key_of, read
from tierkv.storage.cold import ColdTier

ROOT = Path(__file__).parents[2]
SIZE = 60_000
SETTINGS: dict[str, Any] = {"capacity_bytes": 10 << 20, "segment_bytes": 2 << 20}

# Prints a line per acknowledged change: "+ n" stored, "- n" deleted, "x n" evicted.
WRITER = """
import sys
from tests.conformance.tier_suite import block, key_of, meta_of
from tierkv.storage.cold import ColdTier

path, sync, number, size, capacity, segment = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
names = {}

def say(sign, *numbers):
    print("".join(f"{sign} {n}\\n" for n in numbers), end="", flush=True)

def evicted(keys):
    say("x", *[names.get(key, -1) for key in keys])

tier = ColdTier(path, capacity_bytes=capacity, segment_bytes=segment, codec="raw", sync=sync, sync_interval_s=0.001,
                on_evict=evicted)
names.update({key_of(n): n for n in range(number)})
while True:
    batch = range(number, number + 1 + number % 4)
    names.update({key_of(n): n for n in batch})
    payloads = [block(n, size) for n in batch]
    assert not any(tier.put_many([(key_of(n), p, meta_of(p)) for n, p in zip(batch, payloads)]))
    say("+", *batch)
    tier.touch([key_of(number - number % 50)])
    if number % 3 == 0 and tier.delete(key_of(number)):
        say("-", number)
    number = batch[-1] + 1
"""


def run_writer(path: Path, sync: str, first: int) -> subprocess.Popen[str]:
    arguments = [path, sync, first, SIZE, SETTINGS["capacity_bytes"], SETTINGS["segment_bytes"]]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_until_killed(writer: subprocess.Popen[str], after: int) -> Iterator[str]:
    """Yield the acknowledged lines; kill the writer when `after` of them were seen, then yield what it still said."""
    assert writer.stdout is not None
    for count, line in enumerate(writer.stdout, 1):
        if line.endswith("\n"):
            yield line
        if count == after:
            writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()


@pytest.mark.parametrize("sync", ["none", "interval", "commit"])
def test_kill_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, sync: str) -> None:
    choose = random.Random(sync)
    store = tmp_path / "cold"
    expected: set[int] = set()
    gone: set[int] = set()
    number = 0
    for _ in range(4):
        for line in lines_until_killed(run_writer(store, sync, number), choose.randrange(20, 500)):
            sign, name = line.split()
            if sign == "+":
                expected.add(int(name))
                number = int(name)
            else:
                expected.discard(int(name))
                gone.add(int(name))
        with closing(ColdTier(store, codec="raw", sync="none", **SETTINGS)) as tier:
            assert tier.damage == {}
            there = {n for n in range(number + 10) if tier.meta(key_of(n)) is not None}
            assert tier.usage().blocks == len(there) == len(list(tier.records()))
            assert tier.usage().payload_bytes == SIZE * len(there)
            for n in there:
                assert read(tier, key_of(n)) == block(n, SIZE)
        assert not there & gone, "what was deleted or evicted does not come back"
        # Missing can only be what was not said any more: an eviction under way (of the oldest), and one delete.
        missing = expected - there
        assert len(missing) <= SETTINGS["segment_bytes"] // SIZE + 1
        assert {n for n in sorted(expected)[-30:] if n % 3} <= there
        number += 10
        expected = there
