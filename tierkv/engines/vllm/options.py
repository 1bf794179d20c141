"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tierkv.config import Count, FilePath, MemorySize, Seconds
from tierkv.errors import ConfigError

__all__ = ["Options", "parse_options"]


class Options(BaseModel):
    """The connector's settings.

    Attributes
    ----------
    url
        Where the daemon is, see `tierkv.connect`.
    config
        Settings, or the path of a YAML file, of a cache embedded in the engine's process instead, see `tierkv.open`.
    tenant, token, ca
        As in `tierkv.connect`.
    block_tokens
        Tokens per tierkv block, a multiple of the engine's block size; None: the smallest that is at least 64.
    wait_s
        Longest time a request waits for its blocks to come up from a lower tier, in seconds.
    compute_s
        Let engines that share a daemon prefill a common prompt once, see `tierkv.cache.Cache.acquire`; 0: do not.
    extra_s
        Longest time that asking the daemon takes beyond `wait_s`, in seconds.
    staging_bytes
        Memory of each worker for blocks on their way to the cache. What does not fit is not stored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None
    config: Mapping[str, Any] | str | None = None
    tenant: str | None = None
    token: str | None = Field(default=None, repr=False)
    ca: FilePath | None = None
    block_tokens: Annotated[Count, Field(gt=0)] | None = None
    wait_s: Seconds = 2.0
    compute_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    extra_s: Seconds = 0.25
    staging_bytes: MemorySize = Field(default="256MiB", validate_default=True)

    @model_validator(mode="after")
    def _one_cache(self) -> Self:
        if (self.url is None) == (self.config is None):
            raise ValueError("name a daemon with url, or a cache in this process with config, and not both")
        if self.config is not None and (self.token or self.ca):
            raise ValueError("token and ca are for a daemon; a cache in this process needs neither")
        return self


def parse_options(data: Mapping[str, Any]) -> Options:
    """Check what the user wrote. Raises `ConfigError` with every fault found."""
    try:
        return Options.model_validate(dict(data))
    except ValidationError as error:
        faults = "; ".join(_explain(fault["loc"], fault["type"], fault["msg"]) for fault in error.errors())
        known = ", ".join(Options.model_fields)
        raise ConfigError(f"kv_connector_extra_config: {faults}", remedy=f"known settings are {known}") from None


def _explain(where: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(map(str, where))
    if kind != "extra_forbidden":
        return f"{name}: {message}".replace("Value error, ", "").removeprefix(": ")
    close = difflib.get_close_matches(name, list(Options.model_fields), n=1)
    return f"{name}: unknown setting" + (f", did you mean {close[0]!r}?" if close else "")
