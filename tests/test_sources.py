"""Where settings come from: file, environment, command line, and what is said about it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import Config, parse_config
from tierkv.errors import ConfigError
from tierkv.sources import NOT_SETTINGS, Sources, leaves, schema, to_yaml

CONFIGS = Path(__file__).parents[1] / "configs"


def read(environ: Mapping[str, str], path: Path | None = None, **options: object) -> Config:
    return Sources(path, environ, options).read().config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("socket: /file\nstate_dir: /file\nport: 1\nwarm: {capacity: 1MiB, directory: /file}\n")
    return path


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    environ = {"TIERKV_SOCKET": "/environment", "TIERKV_STATE_DIR": "/environment", "TIERKV_WARM__CAPACITY": "2MiB"}
    effective = Sources(file, environ, {"socket": "/option", "state_dir": None}).read()
    config = effective.config
    assert (str(config.socket), str(config.state_dir), config.port) == ("/option", "/environment", 1)
    assert (config.warm.capacity, str(config.warm.directory)) == (2 << 20, "/file")
    assert effective.origins == {
        "socket": "--socket",
        "state_dir": "TIERKV_STATE_DIR",
        "port": str(file),
        "warm.capacity": "TIERKV_WARM__CAPACITY",
        "warm.directory": str(file),
    }


def test_the_file_is_read_again_each_time(file: Path) -> None:
    sources = Sources(file, {}, {})
    assert sources.read().config.port == 1
    file.write_text("port: 2\n")
    assert sources.read().config.port == 2


@pytest.mark.parametrize(
    ("variable", "value", "setting", "expected"),
    [
        ("TIERKV_PORT", "8780", "port", 8780),
        ("TIERKV_PORT", "", "port", None),
        ("TIERKV_COLD__SYNC_INTERVAL", "250ms", "cold.sync_interval", 0.25),
        ("TIERKV_LIMITS__LEASE", "2h", "limits.lease", 7200.0),
        ("TIERKV_LOG__LEVEL", "debug", "log.level", "debug"),
        ("TIERKV_WARM__DEMOTE_AHEAD", "1", "warm.demote_ahead", 1.0),
    ],
)
def test_variables_are_read_like_the_file(variable: str, value: str, setting: str, expected: object) -> None:
    found: Any = read({variable: value})
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == expected


def test_values_may_have_a_structure() -> None:
    environ = {
        "TIERKV_HOT__POLICY": "{name: slru, protected: 0.5}",
        "TIERKV_TENANTS": "{chat: {weight: 3}, batch: {warm: 1GiB}}",
    }
    config = read(environ)
    assert config.hot.policy.parameters == {"protected": 0.5}
    assert (config.tenants["chat"].weight, config.tenants["batch"].warm) == (3, 1 << 30)


def test_variables_of_others_are_left_alone() -> None:
    assert read({"PATH": "/bin", "WARM__CAPACITY": "3", **dict.fromkeys(NOT_SETTINGS, "x")}) == Config()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TIERKV_WARM__CAPACTY": "1GiB"}, ["TIERKV_WARM__CAPACTY", "did you mean TIERKV_WARM__CAPACITY?"]),
        ({"TIERKV_WARM_CAPACITY": "1GiB"}, ["did you mean TIERKV_WARM__CAPACITY?", "two underscores"]),
        ({"TIERKV_UR": "x"}, ["TIERKV_UR", "did you mean TIERKV_URL?"]),
        ({"TIERKV_TENANTS__CHAT__WEIGHT": "2"}, ["TIERKV_TENANTS__CHAT__WEIGHT", "no setting has this name"]),
        ({"TIERKV_": "2"}, ["TIERKV_", "no setting"]),
        ({"tierkv_port": "2", "TIERKV_port": "2"}, ["TIERKV_port", "no setting"]),
        ({"TIERKV_WARM__CAPACITY": "lots"}, ["TIERKV_WARM__CAPACITY: warm.capacity: not a size"]),
        ({"TIERKV_SOCKET": "[a"}, ["TIERKV_SOCKET is not a YAML value", "quotation marks"]),
        ({"TIERKV_PORT": "tcp://10.0.0.1:8780"}, ["TIERKV_PORT: port: not a whole number"]),
    ],
)
def test_mistakes_name_the_variable(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(environ)
    assert all(word in str(caught.value) for word in words), caught.value


def test_each_mistake_is_blamed_on_its_source(file: Path) -> None:
    file.write_text("port: -1\nwarm: {capacity: 1MiB}\n")
    with pytest.raises(ConfigError) as caught:
        read({"TIERKV_WARM__CAPACITY": "x"}, file, socket="/tmp/" + "x" * 200)
    said = str(caught.value)
    assert f"{file}: port" in said
    assert "TIERKV_WARM__CAPACITY: warm.capacity" in said
    assert "--socket: socket: the path of a Unix socket has at most 107 bytes" in said


@pytest.mark.parametrize("text", ["- a", "warm: 5"])
def test_a_file_of_the_wrong_shape_stays_wrong(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        read({"TIERKV_WARM__CAPACITY": "1GiB"}, file)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_shown_can_be_read_again(path: Path, tmp_path: Path) -> None:
    effective = Sources(path, {"TIERKV_COLD__CAPACITY": "12345"}, {}).read()
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(effective))
    assert read({}, again) == effective.config


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "socket": st.from_regex(r"/[ -~]{1,40}", fullmatch=True),
            "warm": st.fixed_dictionaries({"capacity": st.integers(1 << 20, 1 << 44)}),
            "limits": st.fixed_dictionaries({"wait": st.floats(1e-3, 1e9)}),
            "hot": st.fixed_dictionaries({"policy": st.just({"name": "slru", "protected": 0.25})}),
        },
    )
)
def test_any_value_survives_being_shown(data: dict[str, Any]) -> None:
    from tierkv.sources import Effective

    config = parse_config(data)
    shown = to_yaml(Effective(config, {}))
    assert parse_config(yaml.safe_load(shown)) == config


def test_every_setting_is_shown_with_its_origin(file: Path) -> None:
    lines = to_yaml(Sources(file, {"TIERKV_PORT": "2"}, {}).read()).splitlines()
    shown = [line for line in lines if "  # " in line]
    assert len(shown) == len(list(leaves(Config)))
    assert any(line.startswith("port: 2 ") and line.endswith("# TIERKV_PORT") for line in shown)
    assert any(line.startswith("host: ") and line.endswith("# default") for line in shown)
    assert any(line.startswith("  capacity: 1MiB ") and line.endswith(f"# {file}") for line in shown)


def _schema_names(found: dict[str, Any], root: dict[str, Any], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, inner in found["properties"].items():
        ref = next((choice["$ref"] for choice in inner.get("anyOf", [inner]) if "$ref" in choice), None)
        if ref:
            names |= _schema_names(root["$defs"][ref.rpartition("/")[2]], root, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def test_the_schema_has_every_setting_and_no_other() -> None:
    made = schema()
    assert _schema_names(made, made) == set(leaves(Config))
    assert made["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in made["$defs"].values())
    assert "exclusiveMinimum" in json.dumps(made)


def _validator() -> Any:
    found = pytest.importorskip("jsonschema_rs")
    return found.Draft202012Validator(schema())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_takes_every_shipped_file(path: Path) -> None:
    errors = [error.message for error in _validator().iter_errors(yaml.safe_load(path.read_text()))]
    assert errors == []


@pytest.mark.parametrize(
    "data",
    [{"wram": {}}, {"warm": {"capacity": [1]}}, {"port": 65536}, {"limits": {"wait": "soon"}}, {"log": {"level": "x"}}],
)
def test_the_schema_refuses_what_the_daemon_refuses(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_config(data)
    assert not _validator().is_valid(data)


def test_the_schema_takes_the_defaults_it_names() -> None:
    whole = schema()
    for name, part in whole["$defs"].items():
        section = next(key for key, found in whole["properties"].items() if f"#/$defs/{name}'" in str(found))
        defaults = {name: found["default"] for name, found in part["properties"].items() if "default" in found}
        document = {section: {"chat": defaults} if section == "tenants" else defaults}
        assert [error.message for error in _validator().iter_errors(document)] == []
