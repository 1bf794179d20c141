"""What is shipped to run the daemon: a systemd unit, a Dockerfile, and how the daemon reports to systemd."""

import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.service.daemon import Daemon, short_directory
from tierkv.sources import Sources

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy" / "tierkv.service"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with a program that exists: where tierkv is installed to is not here."""
    path = tmp_path / "tierkv.service"
    path.write_text(UNIT.read_text().replace("/opt/tierkv/bin/tierkv", "/bin/true"))
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60)


@needs_systemd
def test_the_unit_is_valid(unit: Path) -> None:
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_unit_is_hardened(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", unit)  # tenths: 2.0 of 10 at most
    assert done.returncode == 0, done.stdout


def test_the_unit_says_how_to_end_and_reload() -> None:
    text = UNIT.read_text()
    assert "Type=notify" in text
    assert "ExecReload=/bin/kill -HUP $MAINPID" in text
    assert "RestartPreventExitStatus=2" in text
    assert re.search(r"^User=(?!root)", text, re.MULTILINE)


def test_systemd_is_told_when_it_is_ready_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(directory / "notify"))
        systemd.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
        daemon = Daemon(directory, {"warm": {"capacity": "1MiB"}})
        try:
            daemon.start()
            assert systemd.recv(100) == b"READY=1"
            daemon.send(signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"
            assert daemon.wait() == 0
        finally:
            daemon.destroy()


def instructions() -> list[tuple[str, str]]:
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_image_is_slim_unprivileged_and_tells_its_health() -> None:
    found = instructions()
    by_name = dict(found)
    bases = [argument.split()[0] for name, argument in found if name == "FROM"]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+-slim", base) for base in bases)
    assert by_name["USER"] == "10001:10001"
    assert by_name["HEALTHCHECK"].endswith('CMD ["tierkv", "health"]')
    assert by_name["ENTRYPOINT"] == '["tierkv"]'
    assert found[-1] == ("CMD", '["serve"]')
    assert "ADD" not in by_name


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignore = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    sources = [
        source
        for name, argument in instructions()
        if name == "COPY" and not argument.startswith("--")
        for source in argument.split()[:-1]
    ]
    assert len(sources) >= 8
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore


def test_the_image_configures_a_daemon_that_can_run() -> None:
    assignments = [shlex.split(argument) for name, argument in instructions() if name == "ENV"]
    environ = dict(item.split("=", 1) for line in assignments for item in line)
    config = Sources(None, environ, {}).read().config
    assert (str(config.socket), str(config.state_dir)) == ("/run/tierkv/tierkv.sock", "/var/lib/tierkv")
    assert environ["TIERKV_URL"] == f"unix://{config.socket}"
    assert config.log.format == "json"
