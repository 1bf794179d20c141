"""Which cache an engine uses: the settings that all adapters read from their engine's own configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tierkv.config import FilePath, Seconds
from tierkv.errors import ConfigError

__all__ = ["EngineOptions", "read_options"]


class EngineOptions(BaseModel):
    """One cache, and how long an engine waits for it. Adapters add their own settings.

    Attributes
    ----------
    url
        Where the daemon is, see `tierkv.connect`. It may be down, now or later.
    config
        Settings, or the path of a YAML file, of a cache in the engine's process instead, see `tierkv.open`.
    tenant, token, ca
        As in `tierkv.connect`.
    wait_s
        Longest wait, in seconds, for blocks to come up from a lower tier.
    extra_s
        Longest time, in seconds, that asking takes beyond the waits, whatever the daemon does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None
    config: Mapping[str, Any] | str | None = None
    tenant: str | None = None
    token: str | None = Field(default=None, repr=False)
    ca: FilePath | None = None
    wait_s: Seconds
    extra_s: Seconds

    @model_validator(mode="after")
    def _one_cache(self) -> Self:
        if (self.url in (None, "")) == (self.config in (None, "")):
            raise ValueError("name one cache: a daemon with url, or one in this process with config, and not both")
        if not self.url and (self.token or self.ca):
            raise ValueError("token and ca are for a daemon; a cache in this process needs neither")
        return self


OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def read_options(kind: type[OptionsT], data: Mapping[str, Any], source: str) -> OptionsT:
    """Check what the user wrote into `source`. Raises `ConfigError` with every fault found."""
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        faults = "; ".join(_explain(kind, fault["loc"], fault["type"], fault["msg"]) for fault in error.errors())
        known = ", ".join(kind.model_fields)
        raise ConfigError(f"{source}: {faults}", remedy=f"known settings are {known}") from None


def _explain(kind: type[BaseModel], where: tuple[int | str, ...], fault: str, message: str) -> str:
    name = ".".join(map(str, where))
    if fault != "extra_forbidden":
        return f"{name}: {message}".replace("Value error, ", "").removeprefix(": ")
    close = difflib.get_close_matches(name, list(kind.model_fields), n=1)
    return f"{name}: unknown setting" + (f", did you mean {close[0]!r}?" if close else "")
