"""Pins and breakpoints outlive the daemon: stopped, killed, and with a file that is damaged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.daemon import SPEC, Daemon, Raw, chain, eventually, mode, read_back, running, store
from tierkv.cache import Chain
from tierkv.core.pinning import SavedPin
from tierkv.errors import StorageError
from tierkv.service.pins import PinFile

BLOCKS = 6


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running() as started:
        yield started


def file(daemon: Daemon) -> Path:
    return daemon.state_dir / "pins.json"


def saved(daemon: Daemon) -> list[dict[str, Any]]:
    found = json.loads(file(daemon).read_text())["pins"]
    assert isinstance(found, list)
    return found


def pins(daemon: Daemon) -> int:
    return int(Raw(daemon.tcp_port).request("GET", "/v1/stats")[1]["leases"]["pin"])


def mark(daemon: Daemon, prompt: Chain, *points: dict[str, Any]) -> None:
    asked = {"hashes": b"".join(prompt.hashes).hex(), "breakpoints": list(points)}
    assert Raw(daemon.tcp_port).json("POST", f"/v1/{SPEC.namespace}/breakpoints", asked)[0] == 200


def hold(daemon: Daemon) -> None:
    """Two breakpoints of one prompt, and a pin of another; all of it on disk."""
    with daemon.connect() as cache:
        for seed in (1, 2):
            store(cache, chain(BLOCKS, seed=seed))
        cache.flush()
        mark(daemon, chain(BLOCKS, seed=1), {"tokens": 32, "ttl": "1h"}, {})
        assert cache.pin(chain(BLOCKS, seed=2), 1000.0).blocks == BLOCKS


def in_memory(daemon: Daemon, seed: int) -> bool:
    with daemon.connect() as cache:
        hit = cache.lookup(chain(BLOCKS, seed=seed))
    return hit.tiers == ("warm",) * BLOCKS


def test_after_a_restart_they_hold_and_are_loaded_before_anybody_asks(daemon: Daemon) -> None:
    hold(daemon)
    daemon.stop()
    assert mode(file(daemon)) == 0o600
    before = saved(daemon)
    daemon.start()
    assert pins(daemon) == 3
    for seed in (1, 2):
        eventually(lambda seed=seed: in_memory(daemon, seed))  # type: ignore[misc]
    daemon.stop()
    assert saved(daemon) == before  # a restart gives nobody more time
    ends = sorted((len(row["hashes"]) // 64, row["ttl_s"]) for row in before)
    assert ends == [(2, 3600.0), (BLOCKS, 0.0), (BLOCKS, 300.0)]
    assert all(0 < row["until"] - time.time() <= (row["ttl_s"] or 1000.0) + 1 for row in before)


def test_a_hit_renews_one_that_was_placed_before_the_restart(daemon: Daemon) -> None:
    with daemon.connect() as cache:
        store(cache, chain(BLOCKS))
    mark(daemon, chain(BLOCKS), {})
    daemon.stop()
    (row,) = saved(daemon)
    content = json.loads(file(daemon).read_text())
    content["pins"] = [row | {"until": time.time() + 100.0}]
    file(daemon).write_text(json.dumps(content))
    daemon.start()
    with daemon.connect() as cache:
        assert read_back(cache, chain(BLOCKS)) == BLOCKS
    daemon.stop()
    assert saved(daemon)[0]["until"] > time.time() + 200.0


def test_those_of_a_daemon_that_was_killed_are_there_too(daemon: Daemon) -> None:
    hold(daemon)
    eventually(lambda: file(daemon).exists() and len(saved(daemon)) == 3)
    daemon.kill()
    daemon.start()
    assert pins(daemon) == 3


def test_whose_time_is_over_are_dropped(daemon: Daemon) -> None:
    hold(daemon)
    daemon.stop()
    content = json.loads(file(daemon).read_text())
    for row in content["pins"][:2]:
        row["until"] = time.time() - 1.0
    file(daemon).write_text(json.dumps(content))
    daemon.start()
    assert pins(daemon) == 1


def test_without_any_there_is_no_file(daemon: Daemon) -> None:
    hold(daemon)
    daemon.stop()
    content = json.loads(file(daemon).read_text())
    for row in content["pins"]:
        row["until"] = 0.0
    file(daemon).write_text(json.dumps(content))
    daemon.start()
    daemon.stop()
    assert not file(daemon).exists()


def test_a_damaged_file_is_told_of_and_the_daemon_starts_without(daemon: Daemon) -> None:
    daemon.stop()
    file(daemon).write_text('{"version": 1, "specs": [')
    daemon.start()
    assert pins(daemon) == 0
    assert "starting without the pins and breakpoints that were saved" in daemon.log
    assert f"{file(daemon)} is damaged" in daemon.log
    hold(daemon)
    daemon.stop()
    assert len(saved(daemon)) == 3


def test_blocks_that_are_gone_hold_nothing() -> None:
    with running({"warm": {"capacity": "16MiB"}}) as daemon:
        hold(daemon)
        daemon.stop()
        daemon.start()
        assert pins(daemon) == 0


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    kept = PinFile(tmp_path)
    assert kept.read() == ([], [])
    written = [
        SavedPin("ann", SPEC.namespace, chain(3).hashes, 1.5e9, 300.0),
        SavedPin("bob", SPEC.namespace, chain(1).hashes, 1.0, 0.0),
    ]
    kept.write([SPEC], written)
    assert kept.read() == ([SPEC], written)
    assert [path.name for path in tmp_path.iterdir()] == ["pins.json"]
    kept.write([SPEC], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "specs": [{}], "pins": []}', "\0"])
def test_what_is_no_file_of_pins_is_damage(tmp_path: Path, text: str) -> None:
    kept = PinFile(tmp_path)
    kept.path.write_text(text)
    with pytest.raises(StorageError, match="damaged"):
        kept.read()


@pytest.mark.parametrize(
    "change",
    [
        *({"hashes": value} for value in ("", "ab", "zz", 3)),
        *({"until": value} for value in (float("nan"), float("inf"), "soon")),
        *({"ttl_s": value} for value in (-1.0, float("inf"), None)),
        {"tenant": "a b"},
    ],
)
def test_what_is_no_pin_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    kept = PinFile(tmp_path)
    kept.write([SPEC], [SavedPin("ann", SPEC.namespace, chain(3).hashes, 1.5e9, 300.0)])
    content = json.loads(kept.path.read_text())
    content["pins"][0] |= change
    kept.path.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="damaged"):
        kept.read()
