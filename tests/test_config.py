"""Configuration: every setting documented, every mistake named."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from tierkv.config import Config, load_config, parse_config
from tierkv.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def settings(model: type[BaseModel], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names |= settings(inner, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def keys(data: dict[str, Any], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, value in data.items():
        names |= keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return names


def test_the_commented_file_shows_every_setting_with_its_default() -> None:
    path = CONFIGS / "default.yaml"
    assert keys(yaml.safe_load(path.read_text())) == settings(Config)
    assert load_config(path) == Config()


def test_every_shipped_file_is_valid() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) >= 2
    for path in files:
        load_config(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"wram": {}}, ["wram: unknown setting, did you mean 'warm'?"]),
        ({"warm": {"capcity": 3}}, ["warm.capcity", "did you mean 'capacity'?"]),
        ({"zzz": 1}, ["zzz: unknown setting"]),
        ({1: 2}, ["1"]),
        ({"warm": {"capacity": -5}}, ["warm.capacity: not a size", "8GiB"]),
        ({"warm": {"capacity": "-5GiB"}}, ["warm.capacity: not a size"]),
        ({"warm": {"capacity": 0}}, ["warm.capacity", "1048576"]),
        ({"warm": {"capacity": "lots"}}, ["warm.capacity: not a size"]),
        ({"warm": {"capacity": True}}, ["warm.capacity: not a size"]),
        ({"warm": {"capacity": 10**30}}, ["warm.capacity"]),
        ({"warm": {"capacity": "99999PiB"}}, ["warm.capacity"]),
        ({"warm": {"capacity": float("inf")}}, ["warm.capacity: not a size"]),
        ({"warm": {"demote_ahead": 1.5}}, ["warm.demote_ahead"]),
        ({"warm": {"demote_ahead": "x"}}, ["warm.demote_ahead"]),
        ({"warm": {"demote_ahead": float("nan")}}, ["warm.demote_ahead"]),
        ({"warm": {"policy": "lfu"}}, ["warm.policy: unknown policy; use one of lru, slru"]),
        ({"warm": {"policy": ["slru"]}}, ["warm.policy"]),
        ({"warm": {"directory": ""}}, ["warm.directory: not a path"]),
        ({"hot": {"capacity": -1}}, ["hot.capacity: not a size"]),
        ({"hot": []}, ["hot"]),
        ({"hot": 5}, ["hot"]),
        ({"hot": {"device": 3}}, ["hot.device"]),
        ({"cold": {"codec": "zip"}}, ["cold.codec", "'raw' or 'bx1'"]),
        ({"cold": {"sync": "always"}}, ["cold.sync"]),
        ({"cold": {"sync_interval": 0}}, ["cold.sync_interval"]),
        ({"cold": {"encode_threads": 0}}, ["cold.encode_threads"]),
        ({"cold": {"segment": 5}}, ["cold.segment"]),
        ({"limits": {"lease": "3 fortnights"}}, ["limits.lease: not a duration", "30s"]),
        ({"limits": {"wait": float("inf")}}, ["limits.wait"]),
        ({"limits": {"wait": float("nan")}}, ["limits.wait"]),
        ({"limits": {"wait": True}}, ["limits.wait: not a duration"]),
        ({"limits": {"wait": -1}}, ["limits.wait"]),
        ({"limits": {"blocks": 0}}, ["limits.blocks"]),
        ({"limits": {"blocks": "many"}}, ["limits.blocks: not a whole number"]),
        ({"limits": {"body": 0}}, ["limits.body"]),
        ({"port": "80"}, ["port: not a whole number"]),
        ({"port": True}, ["port: not a whole number"]),
        ({"port": 65536}, ["port"]),
        ({"port": -1}, ["port"]),
        ({"host": "0.0.0.0"}, ["host: the daemon listens on the loopback interface only", "tunnel"]),
        ({"host": "example.org"}, ["host", "loopback"]),
        ({"host": None}, ["host", "loopback"]),
        ({"socket": ""}, ["socket: not a path"]),
        ({"socket": 5}, ["socket: not a path"]),
        ({"socket": "/tmp/" + "x" * 103}, ["socket", "at most 107 bytes"]),
        ({"state_dir": []}, ["state_dir: not a path"]),
        ({"kv_events": {"endpoint": "http://127.0.0.1:5557"}}, ["kv_events.endpoint: not an address", "tcp://"]),
        ({"kv_events": {"endpoint": "ipc:///" + "x" * 107}}, ["kv_events.endpoint", "at most 107 bytes"]),
        ({"kv_events": {"replay": "tcp://127.0.0.1:5558"}}, ["kv_events: replay without endpoint"]),
        ({"load_threads": 0}, ["load_threads"]),
        ({"load_threads": 1.5}, ["load_threads: not a whole number"]),
        ([], ["must be a mapping of settings, not list"]),
        ("text", ["must be a mapping"]),
    ],
)
def test_mistakes_are_named(data: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"port.*warm\.capacity|warm\.capacity.*port"):
        parse_config({"port": -1, "warm": {"capacity": "x"}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("warm: {capacity: 2MiB, capacity: 3MiB}", ["'capacity' is set twice"]),
        ("port: 1\nhost: localhost\nport: 2", ["'port' is set twice", "line 3"]),
        ("warm: [", ["not valid YAML"]),
        ("[" * 5000, ["not valid YAML"]),
        ("- a", ["must be a mapping"]),
        ("state_dir: !!python/object/apply:os.system [true]", ["not valid YAML"]),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(word in str(caught.value) for word in [*words, str(path)]), caught.value


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"socket: \xff")
    for path in (tmp_path / "none", tmp_path, tmp_path / "latin"):
        with pytest.raises(ConfigError, match=str(path)) as caught:
            load_config(path)
        assert caught.value.remedy


def test_units_and_homes() -> None:
    config = parse_config(
        {
            "state_dir": "~/state",
            "socket": "/" + "x" * 106,
            "warm": {"capacity": "1.5 GiB"},
            "cold": {"capacity": 10**9, "sync_interval": "250ms"},
            "limits": {"lease": "2h", "wait": 1},
        }
    )
    assert config.state_dir == Path.home() / "state"
    assert (config.warm.capacity, config.cold.capacity) == (3 << 29, 10**9)
    assert (config.cold.sync_interval, config.limits.lease, config.limits.wait) == (0.25, 7200, 1)


def test_a_section_with_nothing_in_it_has_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("hot:\n#  capacity: 1GiB\nwarm:\n")
    assert load_config(path) == Config()
