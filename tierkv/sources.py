"""Where settings come from: a file, then the environment, then the command line; the later wins.

`TIERKV_WARM__CAPACITY=8GiB` is `warm: {capacity: 8GiB}`: two underscores lead into a section, values are read like
those of the file, and an empty one is null. Tenants are one setting: `TIERKV_TENANTS='{chat: {weight: 3}}'`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ByteSize

from tierkv.config import Config, PolicyConfig, parse_config, read_yaml
from tierkv.errors import ConfigError

__all__ = ["NOT_SETTINGS", "Effective", "Sources", "leaves", "schema", "to_yaml"]

NOT_SETTINGS = frozenset({"TIERKV_URL", "TIERKV_TOKEN", "TIERKV_TRACES", "TIERKV_LONG"})
"""Variables of this prefix that are no settings: of clients and of the tests."""
_PREFIX = "TIERKV_"
_UNITS = tuple((1 << 10 * power, f"{letter}iB") for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")))
_KEYWORDS = {"le": "maximum", "ge": "minimum", "gt": "exclusiveMinimum"}


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration, and by dotted name where each setting that is not a default comes from."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a configuration is read from. It can be read again: the file may have changed.

    Attributes
    ----------
    path
        YAML file; None for none.
    environ
        The environment.
    options
        Settings of the command line, by dotted name; None counts as not given.
    """

    path: str | os.PathLike[str] | None
    environ: Mapping[str, str]
    options: Mapping[str, object]

    def read(self) -> Effective:
        """Read all sources. Raises `ConfigError` naming the file, variable or option at fault. Reads one file."""
        source = "configuration" if self.path is None else str(self.path)
        data = {} if self.path is None else read_yaml(self.path)
        if not isinstance(data, Mapping):
            parse_config(data, source=source)
        given = dict(_from_environment(self.environ))
        for name, value in self.options.items():
            if value is not None:
                given[name] = (f"--{name.replace('_', '-')}", value)
        origins = {name: origin for name, (origin, _) in given.items()}
        for name, (_, value) in given.items():
            data = _with(data, name.split("."), value)
        config = parse_config(data, source=source, origins=origins)
        for name in leaves(Config):
            if name not in origins and _has(data, name.split(".")):
                origins[name] = source
        return Effective(config, origins)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every setting. All tenants together are one."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def to_yaml(effective: Effective) -> str:
    """Return the configuration as YAML that can be read again, with the origin of each setting beside it."""
    lines: list[tuple[str, str]] = []
    section: str | None = None
    for name in leaves(Config):
        parent, _, last = name.rpartition(".")
        if parent and parent != section:
            lines.append((f"{parent}:", ""))
        section = parent
        value: Any = effective.config
        for part in name.split("."):
            value = getattr(value, part)
        dumped = _flow(value)
        lines.append((f"{'  ' if parent else ''}{last}: {dumped}", effective.origins.get(name, "default")))
    width = min(48, max(len(text) for text, _ in lines))
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the configuration file."""
    made: dict[str, Any] = _standard(Config.model_json_schema())
    for name, found in made["properties"].items():
        if "$ref" in found or "additionalProperties" in found:  # a section whose settings are all commented out
            made["properties"][name] = {"anyOf": [found, {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, Any]]]:
    known = {_PREFIX + name.replace(".", "__").upper(): name for name in leaves(Config)}
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable in NOT_SETTINGS:
            continue
        if variable not in known:
            close = difflib.get_close_matches(variable, [*known, "TIERKV_URL", "TIERKV_TOKEN"], n=1)
            raise ConfigError(
                f"{variable}: no setting has this name" + (f", did you mean {close[0]}?" if close else ""),
                remedy="unset it; names are TIERKV_ and the setting, with two underscores after a section's name",
            )
        try:
            value = yaml.safe_load(environ[variable])
        except yaml.YAMLError:
            raise ConfigError(f"{variable} is not a YAML value", remedy="put it in quotation marks") from None
        yield known[variable], (variable, value)


def _with(data: Mapping[str, Any], path: list[str], value: object) -> dict[str, Any]:
    """Return `data` with one setting replaced. A section that is no mapping stays for validation to complain about."""
    if len(path) == 1:
        return {**data, path[0]: value}
    section = data.get(path[0])
    if section is not None and not isinstance(section, Mapping):
        return dict(data)
    return {**data, path[0]: _with(section or {}, path[1:], value)}


def _has(data: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _flow(value: object) -> str:
    """Return a setting's value as YAML on one line."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").rstrip("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(found) for name, found in value if name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {str(name): _plain(found) for name, found in value.items()}
    if isinstance(value, ByteSize):
        unit = next(((size, name) for size, name in _UNITS if value and value % size == 0), None)
        return f"{value // unit[0]}{unit[1]}" if unit else int(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str | int | float | list | tuple | None):
        return list(value) if isinstance(value, tuple) else value
    return _plain(value.plain())


def _standard(found: Any) -> Any:
    """Replace what pydantic leaves as it is: its own keywords for bounds, and policies that are defaults."""
    if isinstance(found, dict):
        if found.keys() == {"name", "parameters"}:
            return PolicyConfig(**found).plain()
        return {_KEYWORDS.get(name, name): _standard(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_standard(value) for value in found]
    return found
