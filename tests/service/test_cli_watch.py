"""`tierkv health`, `top`, `inspect` and `clear` against a real daemon and a real store."""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.service.cli import Command, command
from tests.service.daemon import (
    PATIENCE_S,
    ROOT,
    SPEC,
    TIERS,
    Daemon,
    chain,
    read_back,
    running,
    short_directory,
    store,
)
from tierkv.service.top import frame

TENANTS = {"chat": {"weight": 3, "cold": "8MiB"}}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({**TIERS, "tenants": TENANTS}) as daemon:
        yield daemon


@pytest.fixture
def tierkv(capfd: pytest.CaptureFixture[str], daemon: Daemon) -> Iterator[Command]:
    with command(capfd, TIERKV_URL=daemon.url) as run:
        yield run


def test_health(tierkv: Command, capfd: pytest.CaptureFixture[str]) -> None:
    assert tierkv("health")[:2] == (0, "ok\n")
    code, out, error = tierkv("health", "--url", "unix:///nowhere/s")
    assert (code, out, "cannot be reached" in error) == (8, "", True)


def test_one_frame_of_top(tierkv: Command, daemon: Daemon) -> None:
    with daemon.connect("chat") as cache:
        store(cache, chain(8))
        assert read_back(cache, chain(10)) == 8
    code, out, _ = tierkv("top", "--once")
    assert code == 0
    row = next(line for line in out.splitlines() if "chat" in line)
    assert "80.0%" in row
    assert all(word in out for word in ("since the start", "warm", "cold", "16.0 MiB", "64.0 MiB", "0 read"))


def test_a_frame_is_about_the_time_between_two_answers(daemon: Daemon) -> None:
    with daemon.connect("top") as cache:
        store(cache, chain(4, seed=1))
        read_back(cache, chain(4, seed=1))
        before = cache.stats()
        read_back(cache, chain(8, seed=1))
        now = cache.stats()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(frame(daemon.url, before, now))
    out = capture.get()
    assert "50.0% hit" in out
    assert "50.0%" in next(line for line in out.splitlines() if "│ top " in line)
    assert "-" in next(line for line in out.splitlines() if "│ chat " in line)


def test_top_names_what_is_wrong(daemon: Daemon) -> None:
    with daemon.connect() as cache:
        now = cache.stats()
    now["counters"]["corrupt_blocks"] = {"cold/checksum": 3}
    console = Console(width=120)
    with console.capture() as capture:
        console.print(frame(daemon.url, now, now))
    assert "3 corrupt blocks found and removed: 3 cold/checksum" in capture.get()


def _read_until(terminal: int, word: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + PATIENCE_S
    while word not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 65536)
    return seen


def test_top_lives_on_a_terminal_until_interrupted_and_waits_for_a_daemon_that_went_away() -> None:
    with running(TIERS) as daemon:
        ours, theirs = pty.openpty()
        program = [sys.executable, "-m", "tierkv.service", "top", "--url", daemon.url, "--interval", "0.1"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
        top = subprocess.Popen(
            program, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True
        )
        os.close(theirs)
        try:
            _read_until(ours, b"last ")
            daemon.stop()
            _read_until(ours, b"cannot be reached")
            daemon.start()
            _read_until(ours, b"since the start")
            top.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the terminal's end
                while select.select([ours], [], [], PATIENCE_S)[0] and os.read(ours, 65536):
                    pass
            assert top.wait(PATIENCE_S) == 0
        finally:
            top.kill()
            top.wait()
            os.close(ours)


def test_inspect_a_daemon(tierkv: Command, daemon: Daemon) -> None:
    with daemon.connect("chat") as cache:
        store(cache, chain(2, seed=2))
        cache.flush()
    code, out, _ = tierkv("inspect")
    assert code == 0
    assert all(word in out for word in (SPEC.namespace[:16], "chat", "of 8.0 MiB", "segment-000001.lmdb", "filling"))
    found = json.loads(tierkv("inspect", daemon.tcp_url, "--json")[1])
    assert [n["namespace"] for n in found["namespaces"]] == [SPEC.namespace]
    assert found["tenants"]["chat"]["weight"] == 3


def test_a_store_in_use_is_left_alone(tierkv: Command, daemon: Daemon) -> None:
    code, out, error = tierkv("inspect", "--state-dir", daemon.state_dir)
    assert (code, out) == (5, "")
    assert daemon.process is not None
    assert f"in use by process {daemon.process.pid}" in error


def test_clear_asks_first_and_takes_only_one_tenants_blocks(tierkv: Command, daemon: Daemon) -> None:
    with daemon.connect("gone") as gone, daemon.connect("stays") as stays:
        for cache in (gone, stays):
            store(cache, chain(3, seed=3))
        arguments = ("clear", "--namespace", SPEC.namespace[:12], "--tenant", "gone")
        code, _, error = tierkv(*arguments)
        assert (code, "--yes" in error, gone.lookup(chain(3, seed=3)).blocks) == (2, True, 3)
        code, out, _ = tierkv(*arguments, "--yes")
        assert (code, out) == (0, f"removed 3 blocks of gone in {SPEC.namespace}\n")
        assert (gone.lookup(chain(3, seed=3)).blocks, stays.lookup(chain(3, seed=3)).blocks) == (0, 3)


@pytest.mark.parametrize(("namespace", "code", "word"), [("f" * 64, 3, "inspect"), (SPEC.namespace[:3], 2, "digits")])
def test_clear_wants_one_namespace(tierkv: Command, daemon: Daemon, namespace: str, code: int, word: str) -> None:
    daemon.connect().close()
    got, _, error = tierkv("clear", "--namespace", namespace, "--yes")
    assert (got, word in error) == (code, True)


@pytest.fixture(scope="module")
def left() -> Iterator[Daemon]:
    """What a daemon that ended left: blocks of two tenants."""
    with short_directory() as directory:
        daemon = Daemon(directory)
        try:
            daemon.start()
            for tenant, blocks in (("default", 5), ("other", 2)):
                with daemon.connect(tenant) as cache:
                    store(cache, chain(blocks))
            assert daemon.stop() == 0
            yield daemon
        finally:
            daemon.destroy()


def _files(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


def test_inspect_what_a_daemon_left_changes_nothing(tierkv: Command, left: Daemon) -> None:
    before = _files(left.state_dir)
    code, out, _ = tierkv("inspect", "--state-dir", left.state_dir)
    assert code == 0
    assert all(word in out for word in ("segment-000001.lmdb", SPEC.namespace[:16], "default", "56.0 KiB", "yes"))
    found = json.loads(tierkv("inspect", "-c", left.config_path, "--json")[1])
    size = SPEC.layout().nbytes
    assert found["payload_by_namespace"] == {SPEC.namespace: 7 * size}
    assert found["payload_by_tenant"]["default"] == 5 * size
    assert sorted(found["payload_by_tenant"].values()) == [2 * size, 5 * size]
    assert sum(segment["blocks"] for segment in found["segments"]) == 7
    assert _files(left.state_dir) == before


def test_tenants_of_the_configuration_are_shown_by_name(left: Daemon, tierkv: Command, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"state_dir: {left.state_dir}\ntenants: {{other: {{}}}}\n")
    found = json.loads(tierkv("inspect", "-c", config, "--json")[1])
    assert set(found["payload_by_tenant"]) == {"default", "other"}


def test_damage_is_found_without_a_daemon(tierkv: Command, left: Daemon, tmp_path: Path) -> None:
    shutil.copytree(left.state_dir, tmp_path / "state")
    segment = tmp_path / "state" / "cold" / "segment-000001.lmdb"
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 4096)
    code, out, _ = tierkv("inspect", "--state-dir", tmp_path / "state")
    assert (code, "segment-000001.lmdb: truncated" in out) == (0, True)


@pytest.mark.parametrize(("where", "code", "word"), [("empty", 3, "there is no cold store"), ("none", 3, "no cold")])
def test_inspect_where_there_is_no_store(tierkv: Command, tmp_path: Path, where: str, code: int, word: str) -> None:
    (tmp_path / "empty" / "cold").mkdir(parents=True)
    got, _, error = tierkv("inspect", "--state-dir", tmp_path / where)
    assert (got, word in error) == (code, True)
    assert not (tmp_path / "none").exists()
    assert list((tmp_path / "empty" / "cold").iterdir()) == []


def test_inspect_without_an_address(capfd: pytest.CaptureFixture[str]) -> None:
    with command(capfd) as tierkv:
        code, _, error = tierkv("inspect")
    assert (code, "nothing to inspect" in error) == (2, True)
