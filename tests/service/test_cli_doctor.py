"""`tierkv doctor`: each fault it is there for, made on purpose."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.cli import command
from tests.service.daemon import Daemon, short_directory
from tests.storage.fake_cuda import FakeDevice
from tierkv.config import parse_config
from tierkv.service.doctor import Finding, examine, exit_code
from tierkv.service.doctor.mounts import file_system
from tierkv.service.doctor.software import in_range


@pytest.fixture
def here() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def findings(settings: dict[str, Any]) -> dict[str, Finding]:
    found = examine(parse_config(settings))
    assert len({finding.check for finding in found}) == len(found)
    assert all(finding.remedy for finding in found if finding.level != "ok")
    return {finding.check: finding for finding in found}


def good(here: Path) -> dict[str, Any]:
    return {
        "state_dir": str(here / "state"),
        "socket": str(here / "s"),
        "port": 0,
        "warm": {"capacity": "1MiB"},
        "cold": {"capacity": "64MiB"},
    }


def test_a_sound_configuration_has_no_failure_and_leaves_nothing(here: Path) -> None:
    found = findings(good(here))
    assert [f for f in found.values() if f.level == "fail"] == []
    expected = {"settings", "python", "gpu", "clock", "shared-memory", "memory", "locked-memory", "leftovers"}
    expected |= {"open-files", "state", "cold", "disk-room", "file-system", "allocation", "direct-io", "disk-speed"}
    assert expected | {"socket", "port", "tokens", "packages"} <= found.keys()
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("capacity", "level", "said"), [("512MiB", "ok", "fits"), ("2GiB", "fail", "2048 MiB, cuda:0 has 1024 MiB free")]
)
def test_the_gpu_is_asked_for_room(
    here: Path, monkeypatch: pytest.MonkeyPatch, capacity: str, level: str, said: str
) -> None:
    device = FakeDevice(total_bytes=1 << 30)
    monkeypatch.setattr("tierkv.service.doctor.software.open_device", lambda name: device)
    found = findings({**good(here), "hot": {"capacity": capacity, "device": "cuda:0"}})
    assert (found["gpu"].level, found["gpu-memory"].level) == ("ok", level)
    assert said in found["gpu-memory"].message
    assert device.bus_id in found["gpu"].message
    assert "allocate" not in device.calls


def test_a_gpu_that_cannot_be_used_is_a_failure_with_a_remedy(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = findings({**good(here), "hot": {"capacity": "1MiB", "device": "cuda:0"}})
    assert found["gpu"].level == "fail"
    assert "needs CuPy" in found["gpu"].message


def _foreign_cold(here: Path) -> dict[str, Any]:
    (here / "photos").mkdir()
    (here / "photos" / "cat.jpg").write_bytes(b"meow")
    return {"cold": {"capacity": "64MiB", "path": str(here / "photos")}}


def _open_state(here: Path) -> dict[str, Any]:
    (here / "state").mkdir()
    (here / "state").chmod(0o755)
    return {}


def _open_secret(here: Path) -> dict[str, Any]:
    (here / "state").mkdir(mode=0o700)
    (here / "state" / "secret").write_bytes(b"x" * 32)
    (here / "state" / "secret").chmod(0o644)
    return {}


def _file_as_socket(here: Path) -> dict[str, Any]:
    (here / "s").write_text("precious")
    return {}


@pytest.mark.parametrize(
    ("fault", "check", "level", "word"),
    [
        (lambda _: {"cold": {"capacity": "1MiB"}, "warm": {"capacity": "2MiB"}}, "settings", "fail", "smaller than"),
        (lambda _: {"cold": {"capacity": "64MiB"}, "state_dir": None}, "settings", "fail", "no place"),
        (lambda _: {"state_dir": None, "cold": {"capacity": 0}}, "state", "warn", "survives"),
        (lambda _: {"warm": {"capacity": "900GiB"}, "cold": {"capacity": 0}}, "shared-memory", "fail", "900.0 GiB"),
        (lambda _: {"warm": {"capacity": "900GiB"}, "cold": {"capacity": 0}}, "memory", "warn", "900.0 GiB"),
        (lambda _: {"warm": {"directory": "/nowhere"}}, "shared-memory", "fail", "/nowhere"),
        (lambda here: {"warm": {"directory": str(here)}}, "shared-memory-kind", "warn", "not memory"),
        (lambda _: {"cold": {"capacity": "900TiB"}}, "disk-room", "warn", "900.0 TiB"),
        (lambda _: {"cold": {"capacity": "2GiB", "path": "/dev/shm/c"}}, "file-system", "warn", "memory"),
        (lambda _: {"cold": {"capacity": "2GiB", "path": "/dev/null/c"}}, "cold", "fail", "cannot be made"),
        (lambda _: {"state_dir": "/dev/null/state"}, "state", "fail", "/dev/null"),
        (_foreign_cold, "cold", "fail", "no cold store"),
        (_open_state, "state", "warn", "open to other users"),
        (_open_secret, "secret", "fail", "open to other users"),
        (_file_as_socket, "socket", "fail", "is not a socket"),
        (lambda _: {"socket": None, "port": None}, "address", "fail", "no address"),
        (lambda _: {"socket": "/nowhere/s"}, "socket", "fail", "/nowhere"),
        (lambda _: {"host": "0.0.0.0"}, "tokens", "fail", "no tokens"),
        (lambda here: {"tls": {"certificate": str(here / "c"), "key": str(here / "k")}}, "tls", "fail", "c"),
    ],
)
def test_faults_are_found(here: Path, fault: Any, check: str, level: str, word: str) -> None:
    settings = good(here)
    found = findings({**settings, **fault(here)})[check]
    assert (found.level, word in found.message) == (level, True), found


def test_a_port_of_somebody_else(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        found = findings({**good(here), "port": other.getsockname()[1]})["port"]
    assert (found.level, "no tierkv" in found.message) == ("fail", True)


def test_a_socket_left_by_the_dead(here: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(here / "s"))
    found = findings(good(here))["socket"]
    assert (found.level, "will be replaced" in found.message) == ("ok", True)


def test_a_running_daemon_is_recognised_and_its_leftovers_when_killed(here: Path) -> None:
    daemon = Daemon(here)
    try:
        daemon.start()
        settings = {**good(here), "port": daemon.tcp_port, "state_dir": str(daemon.state_dir)}
        found = findings(settings)
        assert "a tierkv daemon is running" in found["socket"].message
        assert "a tierkv daemon is running" in found["port"].message
        assert "in use by process" in found["cold"].message
        name = daemon.shared_files()[0].name
        assert name not in found["leftovers"].message
        daemon.kill()
        found = findings(settings)
        assert (found["leftovers"].level, "killed daemons left" in found["leftovers"].message) == ("warn", True)
        assert found["socket"].level == found["cold"].level == "ok"
    finally:
        daemon.destroy()


def test_exit_codes_and_json(capfd: pytest.CaptureFixture[str], here: Path) -> None:
    config = here / "c.yaml"
    config.write_text(json.dumps({**good(here), "socket": "/nowhere/s"}))
    with command(capfd) as tierkv:
        code, out, _ = tierkv("doctor", "-c", config)
        assert code == 2
        assert "fail socket: /nowhere is not a directory" in out
        assert "choose another socket path" in out
        code, out, _ = tierkv("doctor", "-c", config, "--json")
    assert code == 2
    assert {"check", "level", "message", "remedy"} == set(json.loads(out)[0])
    levels = [Finding("a", level, "", "") for level in ("ok", "warn", "fail")]  # type: ignore[arg-type]
    assert [exit_code(levels[:count]) for count in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("3.10", ">=3.10,<4", True),
        ("3.9.9", ">=3.10,<4", False),
        ("4", ">=3.10,<4", False),
        ("4.0.0", "<4", False),
        ("3.11.2rc1", ">=3.10,<4", True),
        ("1.0", "==1", True),
        ("1.1", "==1", False),
        ("2", ">2", False),
        ("2.0.1", ">2,<=2.0.1", True),
        ("5", "", True),
    ],
)
def test_version_ranges(version: str, bounds: str, expected: bool) -> None:
    assert in_range(version, bounds) is expected


def test_file_systems() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm")) == "tmpfs"
    assert file_system(Path(f"/nowhere-{os.getpid()}")) == file_system(Path("/"))
