"""Daemons that die, hang, lie and run out of disk in the middle of fifty requests: every answer is right, and comes."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.daemon import Daemon, short_directory
from tests.vllm.engine import Ask, Engine, Outcome, engine, eventually, prompt, tierkv_config

TIERS = {"warm": {"capacity": "64MiB"}, "cold": {"capacity": "256MiB", "segment": "16MiB", "codec": "raw"}}
AT_ONCE = 4
"""Requests the engine serves at once: others wait, with their blocks loaded, when something happens."""
ENDED, LATE = 10, 25
"""Of fifty requests, those that have ended when something happens, and those that look for their blocks after it."""


@dataclass
class World:
    """A daemon, an engine that uses it, and one that does not."""

    daemon: Daemon
    engine: Engine
    plain: Engine


@pytest.fixture(scope="module", params=["llama", "gemma"])
def world(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    plain: Callable[[str], Engine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    log = tmp_path_factory.mktemp("logs") / "engine"
    with short_directory() as directory:
        daemon = Daemon(directory, TIERS)
        try:
            daemon.start()
            with engine(models[request.param], log, tierkv_config(daemon.url), max_num_seqs=AT_ONCE) as started:
                yield World(daemon, started, plain(request.param))
        finally:
            daemon.destroy()


@pytest.fixture
def daemon(world: World) -> Iterator[Daemon]:
    """The daemon, running, before and after."""
    yield world.daemon
    world.daemon.send(signal.SIGCONT)
    world.daemon.kill()
    world.daemon.configure(TIERS)
    world.daemon.start()


def fifty(seed: int) -> list[Ask]:
    """Requests of ten conversations, all of which begin with the same 200 tokens."""
    stem = prompt(200, seed=seed)
    talks = [prompt(500, seed=seed + talk, after=stem) for talk in range(1, 11)]
    return [Ask(prompt(600, seed=seed + 100 + n, after=talks[n % 10])) for n in range(50)]


def stored(world: World, asks: list[Ask]) -> list[tuple[int, ...]]:
    """Have the daemon store the blocks of all requests; return what is right to answer."""
    want = world.plain.run(asks).tokens

    def reused() -> bool:
        world.engine.reset()
        outcome = world.engine.run(asks)
        assert outcome.tokens == want
        return min(outcome.cached) >= 512

    eventually(reused)
    world.engine.reset()
    return want


def right(outcome: Outcome, want: list[tuple[int, ...]]) -> None:
    assert outcome.tokens == want
    assert {answer.reason for answer in outcome.answers} == {"length"}


def test_killed_and_started_again(world: World, daemon: Daemon) -> None:
    asks = fifty(1000)
    want = stored(world, asks)
    world.engine.begin(asks, pause=ENDED, late=LATE)
    daemon.kill()
    world.engine.resume()
    right(world.engine.finish(), want)
    world.engine.reset()
    right(world.engine.run(asks[:8]), want[:8])  # still nobody there
    daemon.start()
    assert stored(world, asks) == want  # and used again


def test_frozen_and_thawed(world: World, daemon: Daemon) -> None:
    asks = fifty(2000)
    want = stored(world, asks)
    world.engine.begin(asks, pause=ENDED, late=LATE)
    daemon.send(signal.SIGSTOP)
    world.engine.resume()
    right(world.engine.finish(), want)
    daemon.send(signal.SIGCONT)
    assert stored(world, asks) == want


def test_memory_that_rots(world: World, daemon: Daemon) -> None:
    asks = fifty(3000)
    want = stored(world, asks)
    world.engine.begin(asks, pause=ENDED, late=LATE)
    (arena,) = [path for path in daemon.shared_files() if path.suffix == ".warm"]
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(4096, len(memory), 4099):  # behind the header, at no two places of a block the same
            memory[at] ^= 1 << at % 8
    world.engine.resume()
    right(world.engine.finish(), want)
    with daemon.connect() as cache:
        assert cache.stats()["counters"]["corrupt_blocks"]


def test_a_disk_that_rots(world: World, daemon: Daemon) -> None:
    asks = fifty(4000)
    want = stored(world, asks)
    with daemon.connect() as cache:
        cache.flush()
    daemon.stop()
    noise = random.Random(4)
    segments = sorted((daemon.state_dir / "cold").glob("segment-*.lmdb"))
    assert segments
    for path in segments:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for at in range(16 * 4096, len(memory), 64 * 1024):
                memory[at + noise.randrange(4096)] ^= 0xFF
    daemon.start()
    right(world.engine.run(asks), want)
    with daemon.connect() as cache:
        eventually(lambda: bool(cache.stats()["tiers"]["cold"]["damage"]))
    assert stored(world, asks) == want  # mended


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_that_fills_up(world: World, daemon: Daemon, small_disk: Path) -> None:
    daemon.stop()
    cold = {"path": str(small_disk / "cold"), "capacity": "40MiB", "segment": "8MiB", "codec": "raw"}
    daemon.configure({"warm": {"capacity": "8MiB"}, "cold": cold})
    daemon.start()
    asks = fifty(5000)
    want = world.plain.run(asks).tokens
    world.engine.reset()
    world.engine.begin(asks, pause=ENDED, late=LATE)
    with (small_disk / "filler").open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(64 << 10))
    world.engine.resume()
    right(world.engine.finish(), want)
    world.engine.reset()
    right(world.engine.run(asks), want)
