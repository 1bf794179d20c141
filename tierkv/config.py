"""Configuration: YAML into typed models, with units, and errors that name the key and the remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    model_validator,
)

from tierkv.errors import ConfigError
from tierkv.keys import TENANT_NAME
from tierkv.policy import DEFAULT_POLICY, POLICIES, check_policy

__all__ = [
    "AuthConfig",
    "ColdConfig",
    "Config",
    "HotConfig",
    "InsightConfig",
    "KVEventsConfig",
    "LimitsConfig",
    "LogConfig",
    "PolicyConfig",
    "TLSConfig",
    "TenantConfig",
    "WarmConfig",
    "load_config",
    "parse_config",
    "read_yaml",
]

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m|min|h|d)?")
_SECONDS = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTP]i?B|B)?", re.IGNORECASE)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_LARGEST = 1 << 50
_LARGEST_MEMORY = 16 << 40
_ENDPOINT = re.compile(r"tcp://(\*|[0-9A-Za-z._-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}|ipc://(?P<path>/.+)")
_SHARED_URL = re.compile(r"(valkeys?|rediss?|s3|gs|az)://(?P<place>[^\s]+)")
_PEER = re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[0-9A-Za-z._-]+)(:\d{1,5})?/?")
_SOCKET_BYTES = 107  # sun_path of Linux, less its closing NUL


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """An eviction policy: its name and the parameters that are not left at their defaults."""

    name: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> str | dict[str, str | float]:
        """Return it as it is written in a file."""
        return {"name": self.name, **self.parameters} if self.parameters else self.name


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(value: object) -> object:
    if _number(value):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration; write a number with ms, s, min, h or d, such as 30s")
    return float(match["number"]) * _SECONDS[match["unit"]]


def _size(value: object) -> object:
    text = str(value) if _number(value) else value
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("not a size; write a number with MiB, GiB or TiB, such as 8GiB")
    return text


def _path(value: object) -> object:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("not a path; write it as text, such as /var/lib/tierkv")
    return Path(value).expanduser()


def _integer(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("not a whole number")
    return value


def _share(value: object) -> object:
    if not _number(value):
        raise ValueError("not a number; write a share between 0 and 1")
    return value


def _policy(value: object) -> object:
    if isinstance(value, PolicyConfig):
        return value
    parameters = {} if isinstance(value, str) else value
    if not isinstance(parameters, Mapping) or not value:
        raise ValueError("not a policy; write its name, or {name: slru, protected: 0.5}")
    name = value if isinstance(value, str) else parameters.get("name")
    parameters = {key: number for key, number in parameters.items() if key != "name"}
    try:
        check_policy(name, parameters)
    except ConfigError as error:
        fault = error.message if isinstance(name, str) and name in POLICIES else "unknown policy"
        raise ValueError(f"{fault}; {error.remedy}") from None
    return PolicyConfig(str(name), parameters)


def _host(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("not an address to listen on; use 127.0.0.1 for the loopback interface")
    return value


def _allowed_host(value: object) -> object:
    if not isinstance(value, str) or not _HOST_NAME.fullmatch(value):
        raise ValueError("not a host; write a name or an address without port or brackets, such as kv.example.org")
    return value.lower()


def _socket(path: Path) -> Path:
    if len(os.fsencode(path)) > _SOCKET_BYTES:
        raise ValueError(f"the path of a Unix socket has at most {_SOCKET_BYTES} bytes; choose a shorter one")
    return path


def _endpoint(value: object) -> object:
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not an address of ZeroMQ; write tcp://127.0.0.1:5557 or ipc:///run/tierkv/kv-events")
    if match["path"] is not None:
        _socket(Path(match["path"]))
    return value


def _shared_url(value: object) -> object:
    match = _SHARED_URL.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        # Not shown: whatever it is, it may hold a password.
        raise ValueError(
            "not the address of a storage engine; write valkey://host:6379, valkeys://host:6379 (TLS) or s3://bucket/path"
        )
    if "@" in match["place"]:
        raise ValueError("neither user nor password belongs into it; use the settings user and password_file")
    return value


def _peer(value: object) -> object:
    if not isinstance(value, str) or not _PEER.fullmatch(value):
        raise ValueError("not the address of a daemon; write http://host:7437, or https://")
    return value.rstrip("/")


def _weight(value: object) -> object:
    if not _number(value):
        raise ValueError("not a number; write a weight such as 2")
    return value


def _price(value: object) -> object:
    if not _number(value):
        raise ValueError("not a number; write a price such as 2.5")
    return value


def _name(value: object) -> object:
    if not isinstance(value, str) or not TENANT_NAME.fullmatch(value):
        raise ValueError("not a name; use 1 to 64 letters, digits, dots, dashes or underscores")
    return value


def _section(value: object) -> object:
    return {} if value is None else value  # a section whose settings are all commented out


_Text = Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*[A-Za-z]*\s*$")]
Seconds = Annotated[
    float, BeforeValidator(_seconds, json_schema_input_type=float | _Text), Field(gt=0, allow_inf_nan=False)
]
Size = Annotated[ByteSize, BeforeValidator(_size, json_schema_input_type=int | _Text), Field(le=_LARGEST)]
MemorySize = Annotated[ByteSize, BeforeValidator(_size, json_schema_input_type=int | _Text), Field(le=_LARGEST_MEMORY)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Policy = Annotated[
    PolicyConfig,
    BeforeValidator(_policy, json_schema_input_type=str | dict[str, str | float]),
    PlainSerializer(PolicyConfig.plain),
]
Count = Annotated[int, BeforeValidator(_integer)]
Name = Annotated[str, BeforeValidator(_name)]
Endpoint = Annotated[str, BeforeValidator(_endpoint)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HotConfig(_Model):
    """Paged pool on a GPU (`device: cuda:0`), or in ordinary memory (`cpu`). Capacity 0 switches it off."""

    capacity: MemorySize = ByteSize(0)
    device: str = "auto"
    policy: Policy = PolicyConfig(DEFAULT_POLICY)


class WarmConfig(_Model):
    """Shared-memory arena. `demote_ahead`: share kept free or already written to the cold tier (1: write at once)."""

    capacity: Annotated[MemorySize, Field(ge=1 << 20)] = ByteSize(1 << 30)
    directory: FilePath = Path("/dev/shm")
    policy: Policy = PolicyConfig(DEFAULT_POLICY)
    demote_ahead: Annotated[float, BeforeValidator(_share), Field(ge=0, le=1)] = 0.25


class ColdConfig(_Model):
    """LMDB segments on local disk. Capacity 0 switches it off; `path` defaults to `cold` in the state directory.

    `codec` is for blocks that must be stored exactly; a lossy one is chosen by the namespace (`KVSpec.lossy`).
    """

    capacity: Size = ByteSize(0)
    path: FilePath | None = None
    segment: Annotated[Size, Field(ge=1 << 20)] | None = None
    codec: Literal["raw", "bx1"] = "bx1"
    sync: Literal["none", "interval", "commit"] = "interval"
    sync_interval: Seconds = 5.0
    encode_threads: Annotated[Count, Field(ge=1, le=64)] = 2


class TenantConfig(_Model):
    """What one tenant is granted.

    `weight`: its part of a full memory tier, among the tenants that use it. `scope`: tenants with the same share scope
    read and write each other's blocks. `hot`, `warm`, `cold`: most bytes it has in a tier.
    """

    weight: Annotated[float, BeforeValidator(_weight), Field(gt=0, le=1000)] = 1.0
    scope: Name | None = None
    hot: MemorySize | None = None
    warm: MemorySize | None = None
    cold: Size | None = None


class AuthConfig(_Model):
    """Who may call. Tokens themselves are in `tokens.yaml` of the state directory: `tierkv token new` makes them.

    `allowed_hosts`: names and addresses that requests may call this daemon by, beside those of the loopback interface.
    """

    allowed_hosts: tuple[Annotated[str, BeforeValidator(_allowed_host)], ...] = ()


class TLSConfig(_Model):
    """Certificate (with those it is signed with) and key of the TCP port, PEM. Both or neither."""

    certificate: FilePath | None = None
    key: FilePath | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together; set both or neither")
        return self


class LimitsConfig(_Model):
    """Bounds on what one request may ask for, on what is remembered, and on what is done at once."""

    body: Annotated[Size, Field(ge=1 << 20)] = ByteSize(1 << 30)
    blocks: Annotated[Count, Field(ge=1, le=1 << 20)] = 65536
    lease: Seconds = 600.0
    wait: Seconds = 60.0
    pin: Seconds = 86400.0
    namespaces: Annotated[Count, Field(ge=1, le=1 << 20)] = 1024
    tenants: Annotated[Count, Field(ge=1, le=1 << 20)] = 1024
    sessions: Annotated[Count, Field(ge=1, le=1 << 24)] = 65536
    in_flight: Annotated[Size, Field(ge=1 << 20)] = ByteSize(1 << 30)
    connections: Annotated[Count, Field(ge=1, le=1 << 16)] = 1024
    requests: Annotated[Count, Field(ge=1, le=1 << 16)] = 1024
    leases: Annotated[Count, Field(ge=1, le=1 << 20)] = 4096
    idle: Annotated[Seconds, Field(ge=0.1)] = 30.0

    @model_validator(mode="after")
    def _body_fits(self) -> Self:
        if self.body > self.in_flight:
            raise ValueError("body is more than in_flight; raise in_flight with it")
        return self


class KVEventsConfig(_Model):
    """ZeroMQ addresses at which vLLM's KV events are published, and where what was missed can be asked for."""

    endpoint: Endpoint | None = None
    replay: Endpoint | None = None
    topic: str = ""

    @model_validator(mode="after")
    def _replayed(self) -> Self:
        if self.replay is not None and self.endpoint is None:
            raise ValueError("replay without endpoint: nothing is published; set endpoint too")
        return self


class SharedConfig(_Model):
    """A storage engine that several daemons share blocks through; without `url` there is none.

    `write`: which blocks are offered to the others. `all`: every block as soon as it is published; `demotion`: those
    that reach the cold tier; `hits`: those that were used so many times.
    """

    url: Annotated[str, BeforeValidator(_shared_url)] | None = None
    user: str | None = None
    password_file: FilePath | None = None
    ca_file: FilePath | None = None
    options: dict[str, str] | None = None
    write: Literal["all", "demotion", "hits"] = "all"
    hits: Annotated[Count, Field(ge=1, le=1000)] = 2
    write_rate: Annotated[Size, Field(ge=1 << 20)] | None = None
    in_flight: Annotated[Count, Field(ge=1, le=256)] = 8
    probe_timeout: Seconds = 0.2
    transfer_timeout: Seconds = 5.0
    hedge: Seconds | None = None
    sync: Seconds = 2.0


class ClusterConfig(_Model):
    """Who this daemon is among others, and where they are, for questions that are put to all of them."""

    node: Name | None = None
    peers: tuple[Annotated[str, BeforeValidator(_peer)], ...] = ()


class InsightConfig(_Model):
    """Why prompts are not cached: `GET /v1/insight`.

    `sample`: share of the requests whose causes are looked at. `templates`: how many are listed. `labels`: names for
    them, by id. `text`: keep token ids of prompts that are sent as such. A price per million tokens, or per hour of a
    GPU, says what is lost in money. `trace`: directory of a recording of the traffic; None: there is none.
    """

    enabled: StrictBool = True
    sample: Annotated[float, BeforeValidator(_share), Field(gt=0, le=1)] = 1.0
    templates: Annotated[Count, Field(ge=1, le=1000)] = 32
    labels: dict[str, str] | None = None
    text: StrictBool = False
    price_per_million_tokens: Annotated[float, BeforeValidator(_price), Field(gt=0, allow_inf_nan=False)] | None = None
    price_per_gpu_hour: Annotated[float, BeforeValidator(_price), Field(gt=0, allow_inf_nan=False)] | None = None
    trace: FilePath | None = None
    trace_size: Annotated[Size, Field(ge=1 << 20)] = ByteSize(256 << 20)

    @model_validator(mode="after")
    def _one_price(self) -> Self:
        if self.price_per_million_tokens is not None and self.price_per_gpu_hour is not None:
            raise ValueError("there are two prices; set price_per_million_tokens or price_per_gpu_hour, not both")
        return self


class LogConfig(_Model):
    """What the daemon writes to standard error: `text` is logfmt, `json` one object a line."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(_Model):
    """Everything a cache or daemon needs to know. Documented in configs/default.yaml."""

    state_dir: FilePath | None = None
    secret: FilePath | None = None
    socket: Annotated[FilePath, AfterValidator(_socket)] | None = None
    host: Annotated[str, BeforeValidator(_host)] = "127.0.0.1"
    port: Annotated[Count, Field(ge=0, le=65535)] | None = None
    load_threads: Annotated[Count, Field(ge=1, le=64)] = 2
    load_bytes: Annotated[Size, Field(ge=1 << 20)] = ByteSize(256 << 20)
    hot: Annotated[HotConfig, BeforeValidator(_section)] = HotConfig()
    warm: Annotated[WarmConfig, BeforeValidator(_section)] = WarmConfig()
    cold: Annotated[ColdConfig, BeforeValidator(_section)] = ColdConfig()
    shared: Annotated[SharedConfig, BeforeValidator(_section)] = SharedConfig()
    cluster: Annotated[ClusterConfig, BeforeValidator(_section)] = ClusterConfig()
    tenants: Annotated[dict[Name, Annotated[TenantConfig, BeforeValidator(_section)]], BeforeValidator(_section)] = {}
    limits: Annotated[LimitsConfig, BeforeValidator(_section)] = LimitsConfig()
    kv_events: Annotated[KVEventsConfig, BeforeValidator(_section)] = KVEventsConfig()
    insight: Annotated[InsightConfig, BeforeValidator(_section)] = InsightConfig()
    log: Annotated[LogConfig, BeforeValidator(_section)] = LogConfig()
    auth: Annotated[AuthConfig, BeforeValidator(_section)] = AuthConfig()
    tls: Annotated[TLSConfig, BeforeValidator(_section)] = TLSConfig()

    @property
    def exposed(self) -> bool:
        """Whether the TCP port, if there is one, can be reached from elsewhere than this machine."""
        return self.host not in _LOOPBACK

    @model_validator(mode="after")
    def _known_callers(self) -> Self:
        if self.host not in _LOOPBACK and self.state_dir is None:
            raise ValueError(
                "host: the daemon listens on the loopback interface only, unless callers have tokens, which are kept in"
                " state_dir; set that and make tokens, or use 127.0.0.1 or ::1, and a tunnel to reach it from elsewhere"
            )
        return self


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a YAML file. Raises `ConfigError` naming the file, the key and the remedy."""
    return parse_config(read_yaml(path), source=str(path))


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the plain data of a YAML file, {} for an empty one. Raises `ConfigError`."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="name an existing, readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid YAML: {error}", remedy="compare with what `tierkv config init -` prints"
        ) from None
    return {} if data is None else data


class _StrictLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is set twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_config(
    data: Any, *, source: str = "configuration", origins: Mapping[str, str] = MappingProxyType({})
) -> Config:
    """Validate plain data. Raises `ConfigError` with every fault found.

    Parameters
    ----------
    source
        Where the data is from, for the error.
    origins
        Where single settings are from instead, by dotted name.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source} must be a mapping of settings, not {type(data).__name__}")
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        faults: dict[str, list[str]] = {}
        for fault in error.errors():
            name = ".".join(str(part) for part in fault["loc"])
            explained = _explain(name, fault["loc"], fault["type"], fault["msg"])
            faults.setdefault(origins.get(name, source), []).append(explained)
        told = "; ".join(f"{origin}: {'; '.join(found)}" for origin, found in faults.items())
        raise ConfigError(told, remedy="`tierkv config show` lists every setting") from None


def _explain(name: str, where: tuple[int | str, ...], kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return f"{name}: {message}".replace("Value error, ", "").removeprefix(": ")
    model: type[BaseModel] = Config
    sections = where[:-1]
    if sections[:1] == ("tenants",):
        model, sections = TenantConfig, sections[2:]
    for part in sections:
        inner = model.model_fields[str(part)].annotation
        assert isinstance(inner, type)
        model = inner
    close = difflib.get_close_matches(str(where[-1]), list(model.model_fields), n=1)
    return f"{name}: unknown setting" + (f", did you mean {close[0]!r}?" if close else "")
