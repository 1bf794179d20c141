"""Starts that fail: one error, one remedy, the class's exit code, no traceback, and nothing left behind."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.daemon import PATIENCE_S, ROOT, TIERS, Daemon, running, short_directory
from tierkv.core.build import _write_secret
from tierkv.service.cli import main

Serve = Callable[..., tuple[int, str]]


@pytest.fixture
def here() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def serve(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run `tierkv serve` in this process with a configuration that must fail; return exit code and message."""

    def serve(**settings: Any) -> tuple[int, str]:
        path = here / "config.yaml"
        own = {"socket": str(here / "s"), "state_dir": str(here / "state"), "warm": {"capacity": "1MiB"}}
        path.write_text(yaml.safe_dump({**own, **settings}))
        monkeypatch.setattr(sys, "argv", ["tierkv", "serve", "--config", str(path)])
        before = set(os.listdir("/dev/shm"))
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        assert said.out == ""
        lines = said.err.strip().splitlines()
        assert [line.partition(":")[0] for line in lines] == ["error", "remedy"], lines
        created = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"tierkv-{os.getuid()}-")}
        assert not any(str(os.getpid()) in name for name in created)
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.err

    return serve


CONFIG, STORAGE, DEVICE = 2, 5, 7


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"wram": {}}, CONFIG, ["config.yaml", "did you mean 'warm'?"]),
        ({"warm": {"capacity": "-1GiB"}}, CONFIG, ["warm.capacity"]),
        ({"host": "0.0.0.0"}, CONFIG, ["host", "loopback"]),
        ({"socket": None}, CONFIG, ["no address", "set socket, or port"]),
        ({"socket": "/tmp/" + "x" * 200}, CONFIG, ["107 bytes"]),
        ({"socket": "/nowhere/at/all/s"}, CONFIG, ["/nowhere/at/all/s", "existing directory"]),
        ({"socket": "/dev/null/s"}, CONFIG, ["/dev/null/s", "Not a directory"]),
        ({"warm": {"capacity": "2TiB"}}, STORAGE, ["MiB free", "smaller capacity"]),
        ({"warm": {"capacity": "900TiB"}}, CONFIG, ["warm.capacity", "17592186044416"]),
        ({"warm": {"capacity": "1MiB", "directory": "/nowhere"}}, STORAGE, ["/nowhere"]),
        ({"warm": {"capacity": "1MiB", "directory": "/dev/null"}}, STORAGE, ["/dev/null"]),
        ({"state_dir": "/dev/null/state"}, STORAGE, ["/dev/null/state", "another state_dir"]),
        ({"state_dir": "/dev/null"}, STORAGE, ["/dev/null", "another state_dir"]),
        ({"state_dir": None, "cold": {"capacity": "64MiB"}}, CONFIG, ["cold tier has no place", "set cold.path"]),
        ({"cold": {"capacity": "64MiB", "path": "/dev/null/cold"}}, STORAGE, ["/dev/null/cold"]),
        ({"cold": {"capacity": "64MiB", "path": "/dev/null"}}, STORAGE, ["/dev/null"]),
        ({"cold": {"capacity": 5}}, CONFIG, ["cold tier of 5 bytes"]),
        ({"hot": {"capacity": 5, "device": "cpu"}}, CONFIG, ["hot.capacity", "5 bytes"]),
        ({"hot": {"capacity": "1MiB", "device": "abacus"}}, DEVICE, ["abacus", "cuda:N"]),
        ({"hot": {"capacity": "1MiB", "device": "cuda:99"}}, DEVICE, ["cuda:99"]),
    ],
)
def test_settings_that_cannot_be(
    serve: Serve, here: Path, settings: dict[str, Any], code: int, words: list[str]
) -> None:
    got, said = serve(**settings)
    assert got == code, said
    assert all(word in said for word in words), said
    assert not (here / "s").exists()


def test_a_message_with_markup_in_it_is_printed_as_it_is(serve: Serve) -> None:
    _, said = serve(state_dir="/dev/null/[red]x[/]")
    assert "/dev/null/[red]x[/]" in said


def test_a_port_in_use(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = serve(port=port)
    assert code == CONFIG
    assert f"port {port} on 127.0.0.1 is in use" in said


def test_a_socket_path_that_is_a_file(serve: Serve, here: Path) -> None:
    (here / "s").write_text("precious")
    code, said = serve()
    assert code == STORAGE
    assert "is not a socket" in said
    assert (here / "s").read_text() == "precious"


def test_a_socket_somebody_listens_on(serve: Serve, here: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(here / "s"))
        other.listen(1)
        code, said = serve()
        assert code == STORAGE
        assert "listening on" in said
        assert (here / "s").is_socket()


def test_a_socket_whose_owner_does_not_answer(serve: Serve, here: Path) -> None:
    """A frozen daemon with a full queue is alive all the same."""
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(str(here / "s"))
        other.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(str(here / "s"))
        code, said = serve()
        assert (code, "listening on" in said) == (STORAGE, True)


def test_a_second_daemon_with_the_same_state_or_socket(serve: Serve) -> None:
    with running({"warm": {"capacity": "1MiB"}}) as first:
        code, said = serve(state_dir=str(first.state_dir))
        assert (code, str(first.state_dir) in said, "its own state_dir" in said) == (STORAGE, True, True), said
        code, said = serve(socket=str(first.socket))
        assert (code, "listening on" in said) == (STORAGE, True)
        with first.connect() as cache:
            assert cache.stats()["published_blocks"] == 0


def test_a_second_daemon_with_the_same_cold_store(serve: Serve, here: Path) -> None:
    cold = {"capacity": "64MiB", "segment": "16MiB", "path": str(here / "cold")}
    with running({**TIERS, "cold": cold}):
        code, said = serve(cold=cold)
        assert (code, str(here / "cold") in said, "in use" in said) == (STORAGE, True, True)


def test_a_foreign_directory_as_cold_store(serve: Serve, here: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "cat.jpg").write_bytes(b"meow")
    code, said = serve(cold={"capacity": "64MiB", "path": str(here / "photos")})
    assert code == STORAGE
    assert str(here / "photos") in said
    assert "choose an empty directory" in said
    assert os.listdir(here / "photos") == ["cat.jpg"]


def test_a_damaged_or_foreign_segment_does_not_stop_the_daemon(here: Path) -> None:
    store = here / "state" / "cold"
    daemon = Daemon(here)
    try:
        daemon.start().stop()
        (store / "segment-000007.lmdb").write_bytes(b"not an LMDB file" * 1000)
        daemon.start()
        with daemon.connect() as cache:
            cold = cache.stats()["tiers"]["cold"]
        assert sum(cold["damage"].values()) >= 1
        assert any("segment-000007" in finding for finding in cold["findings"])
        status = subprocess.run(
            [sys.executable, "-m", "tierkv.service", "status", "--url", daemon.url],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE_S,
            check=True,
        )
        assert "segment-000007" in status.stdout
    finally:
        daemon.destroy()


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_secret_of_another_length(serve: Serve, here: Path, content: bytes) -> None:
    (here / "state").mkdir()
    (here / "state" / "secret").write_bytes(content)
    (here / "state" / "secret").chmod(0o600)
    code, said = serve()
    assert (code, str(here / "state" / "secret") in said) == (CONFIG, True)
    assert (here / "state" / "secret").read_bytes() == content


def test_a_secret_others_can_read(serve: Serve, here: Path) -> None:
    (here / "state").mkdir()
    (here / "state" / "secret").write_bytes(b"x" * 32)
    (here / "state" / "secret").chmod(0o644)
    code, said = serve()
    assert (code, "chmod 600" in said) == (CONFIG, True)


def test_a_secret_that_is_a_directory(serve: Serve, here: Path) -> None:
    (here / "state" / "secret").mkdir(parents=True)
    assert serve()[0] == STORAGE


def test_of_two_secrets_written_at_once_the_first_stays(here: Path) -> None:
    path = here / "secret"
    _write_secret(path)
    first = path.read_bytes()
    _write_secret(path)
    assert path.read_bytes() == first
    assert os.listdir(here) == ["secret"]


def test_an_unwritable_secret_leaves_nothing(serve: Serve, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between creation and writing must not leave an empty secret under its name."""

    def crash(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    assert serve()[0] == STORAGE
    assert os.listdir(here / "state") == []


def test_a_dead_socket_is_replaced(here: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(here / "s"))
    daemon = Daemon(here, {"warm": {"capacity": "1MiB"}})
    try:
        daemon.start()
        daemon.connect().close()
        assert daemon.stop() == 0
    finally:
        daemon.destroy()


def test_bad_options_of_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tierkv.service", "status", "--url", "unix:///nowhere/s"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (8, "")
    assert run.stderr.startswith("error: the daemon at unix:///nowhere/s cannot be reached")
    assert "\nremedy: is tierkv serve running there?" in run.stderr
