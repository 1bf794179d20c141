"""Random damage to a store, at rest and under a running tier: never wrong bytes, always counted, always repaired."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import pytest

from tests.service.daemon import chain, read_back, running, store
from tests.torture.harms import HARMS
from tests.torture.support import LONG, ROOT, say

TRIALS = 10_000 if LONG else 2 * len(HARMS)
PROCESSES = (os.cpu_count() or 1) if LONG else 1


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What every trial says; in memory, for no power is lost here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torture-") as home:
        bounds = [TRIALS * n // PROCESSES for n in range(PROCESSES + 1)]
        running = []
        for number in range(PROCESSES):
            directory = f"{home}/{number}"
            os.mkdir(directory)
            first, stop = bounds[number], bounds[number + 1]
            command = [sys.executable, "-m", "tests.torture.trials", directory, str(first), str(stop)]
            out = open(f"{directory}/out", "w+")  # noqa: SIM115
            running.append((subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True), out))
        lines = []
        for process, out in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-3000:]
            out.seek(0)
            lines += out.readlines()
            out.close()
        return [json.loads(line) for line in lines]


def test_no_damage_is_served_lost_silently_or_beyond_repair(results: list[dict[str, Any]]) -> None:
    assert len(results) == TRIALS
    errors = [result for result in results if "error" in result or "error" in result.get("again", {})]
    assert not errors, errors[0]
    causes: Counter[str] = Counter()
    for result in results:
        causes.update(result.get("damage", {}))
        causes.update(result.get("later", {}))
    say(f"{TRIALS} damages, found as {dict(causes.most_common())}")
    assert {"checksum", "header", "index", "torn", "truncated", "not-lmdb", "foreign"} <= causes.keys()


def test_no_process_dies_of_damage(results: list[dict[str, Any]]) -> None:
    """One is known to: a node's flags that rot in a page of the running process, between being checked and used."""
    died = [result for result in results if "signal" in result]
    say(f"{len(died)} processes died of {TRIALS} damages: {Counter((r['mode'], r['harm'], r['signal']) for r in died)}")
    for result in died:
        assert (result["mode"], result["harm"]) in {("running", "bytes in blocks-leaf")}, result
        assert result["signal"] == "SIGSEGV"
        assert "signal" not in result["again"], f"the next start died as well: {result}"
        assert result["again"]["damage"]
    assert len(died) <= max(1, TRIALS // 1000)


MEDDLING = ("truncated", "removed", "renamed", "replaced", "overwritten", "read-only")


@pytest.mark.parametrize("harm", MEDDLING if LONG else MEDDLING[:2])
def test_a_daemon_lives_on_when_its_files_are_meddled_with(harm: str) -> None:
    tiers = {"warm": {"capacity": "4MiB"}, "cold": {"capacity": "20MiB", "segment": "4MiB", "codec": "raw"}}
    with running(tiers) as daemon, daemon.connect(timeout_s=30.0) as cache:
        chains = [chain(64, seed=seed) for seed in range(16)]
        for one in chains:
            assert store(cache, one) == 64
        cache.flush()
        for path in sorted((daemon.state_dir / "cold").glob("segment-*.lmdb")):
            HARMS[harm](path, random.Random(harm))
        found = [read_back(cache, one) for one in chains]
        if harm in ("truncated", "overwritten"):
            assert 0 < sum(found) < 64 * 16
            assert cache.stats()["counters"]["corrupt_blocks"]
            assert cache.stats()["tiers"]["cold"]["damage"]
        for one in chains:
            store(cache, one)
            assert read_back(cache, one) == 64
        cache.flush()
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
        daemon.start()
    # Whatever the restart made of the files: it starts, and serves what it has.
