"""SIGHUP: what can change does, what cannot is named, what is wrong changes nothing."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.daemon import TIERS, Daemon, Raw, chain, eventually, running, store
from tests.service.test_logs import parse_logfmt


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({**TIERS, "tenants": {"chat": {"weight": 3, "scope": "team"}}}) as daemon:
        yield daemon
        assert daemon.process is not None
        assert daemon.process.poll() is None
        assert "Traceback" not in daemon.log


def events(daemon: Daemon) -> list[dict[str, str]]:
    return [parse_logfmt(line) for line in daemon.log.splitlines()]


def reload(daemon: Daemon, settings: dict[str, Any] | str) -> list[dict[str, str]]:
    """Change the file, signal, and return what was logged about it."""
    before = len(events(daemon))
    if isinstance(settings, str):
        daemon.config_path.write_text(settings)
    else:
        daemon.configure({**TIERS, **settings})
    daemon.send(signal.SIGHUP)
    eventually(lambda: any("reloaded" in event["event"] for event in events(daemon)[before:]))
    return events(daemon)[before:]


def test_limits_tenants_and_log_change_without_a_restart(daemon: Daemon) -> None:
    raw = Raw(daemon.tcp_port)
    daemon.connect().close()
    told = reload(
        daemon,
        {
            "limits": {"blocks": 2},
            "load_bytes": "8MiB",
            "tenants": {"chat": {"weight": 5, "scope": "team", "warm": "1MiB"}, "late": {"weight": 2}},
        },
    )
    assert [event["event"] for event in told] == ["configuration reloaded"]
    assert set(told[0]["changed"].split(",")) == {"limits.blocks", "load_bytes", "tenants"}
    tenants = raw.request("GET", "/v1/stats")[1]["tenants"]
    assert (tenants["chat"]["weight"], tenants["chat"]["quotas"]) == (5, {"warm": 1 << 20})
    assert tenants["late"]["weight"] == 2
    status, problem = raw.json("POST", f"/v1/{chain(1).namespace}/lookup", {"tokens": [1] * 48})
    assert (status, "2" in problem["detail"]) == (400, True)
    reload(daemon, {"tenants": {"chat": {"scope": "team"}}})
    assert raw.request("GET", "/v1/stats")[1]["tenants"]["chat"]["weight"] == 1


def test_the_log_changes_its_format_and_level(daemon: Daemon) -> None:
    team = {"chat": {"weight": 3, "scope": "team"}}
    daemon.configure({**TIERS, "log": {"format": "json"}, "tenants": team})
    daemon.send(signal.SIGHUP)
    eventually(lambda: '"event": "configuration reloaded"' in daemon.log)
    daemon.configure({**TIERS, "log": {"level": "warning"}, "tenants": team, "load_threads": 3})
    daemon.send(signal.SIGHUP)
    eventually(lambda: "load_threads" in daemon.log)
    assert daemon.stop() == 0
    assert [line for line in daemon.log.splitlines() if line.startswith("time=")] == []
    daemon.start()


def test_what_needs_a_restart_is_named_and_stays(daemon: Daemon) -> None:
    settings = {
        "warm": {"capacity": "32MiB"},
        "load_threads": 3,
        "tenants": {"chat": {"weight": 3, "scope": "another"}},
        "limits": {"wait": 2},
    }
    told = reload(daemon, settings)
    dead = [event for event in told if event["event"] == "setting needs a restart"]
    assert {event["setting"] for event in dead} == {"warm.capacity", "load_threads", "tenants.*.scope"}
    assert set(told[-1]["changed"].split(",")) == {"limits.wait", "tenants"}
    stats = Raw(daemon.tcp_port).request("GET", "/v1/stats")[1]
    assert stats["tiers"]["warm"]["capacity_bytes"] == 16 << 20
    assert stats["tenants"]["chat"]["scope"] == "team"
    assert {event["setting"] for event in reload(daemon, settings)[:-1]} == {event["setting"] for event in dead}


@pytest.mark.parametrize("text", ["wram: {}", "port: [", "limits: {blocks: 0}"])
def test_a_bad_file_changes_nothing(daemon: Daemon, text: str) -> None:
    (told,) = reload(daemon, text + "\n")
    assert (told["level"], told["event"]) == ("error", "configuration not reloaded: the old one stays")
    assert str(daemon.config_path) in told["detail"]
    with daemon.connect("chat") as cache:
        assert store(cache, chain(3)) == 3
        assert cache.stats()["tenants"]["chat"]["weight"] == 3


def test_a_file_that_is_gone_changes_nothing(daemon: Daemon) -> None:
    daemon.config_path.unlink()
    daemon.send(signal.SIGHUP)
    eventually(lambda: "the old one stays" in daemon.log)
    with daemon.connect("chat") as cache:
        assert store(cache, chain(3)) == 3


def test_blocks_written_before_a_reload_are_still_found(daemon: Daemon) -> None:
    with daemon.connect("chat") as cache:
        assert store(cache, chain(4)) == 4
        reload(daemon, {"tenants": {"chat": {"weight": 1, "scope": "another"}}})
        assert cache.lookup(chain(4)).blocks == 4


def test_signals_in_a_row_are_all_answered_by_the_last_file(daemon: Daemon) -> None:
    daemon.connect().close()
    for blocks in range(1, 8):
        daemon.configure({**TIERS, "limits": {"blocks": blocks}})
        daemon.send(signal.SIGHUP)

    def lookup(blocks: int) -> int:
        path = f"/v1/{chain(1).namespace}/lookup"
        return Raw(daemon.tcp_port).json("POST", path, {"tokens": [1] * 16 * blocks})[0]

    eventually(lambda: (lookup(7), lookup(8)) == (200, 400))
