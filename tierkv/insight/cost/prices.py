"""Price lists: a YAML file of plans, each by the token or by the hour of a GPU.

    as_of: 2026-11-01
    currency: EUR
    plans:
      flat: {input: 3.00, output: 15.00}
      cached: {input: 3.00, output: 15.00, cached_input: 0.30, cache_write: 3.75, ttl: 5min, minimum_tokens: 1024}
      own: {gpu_hour: 2.00, prefill_tokens_per_s: 8000, decode_tokens_per_s: 1500}

Prices are read as decimal numbers; nothing here or after it goes through a binary fraction.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError, model_validator

from tierkv.config import read_yaml
from tierkv.errors import ConfigError
from tierkv.policy import DEFAULT_POLICY, check_policy

__all__ = ["GPUPlan", "PriceList", "TokenPlan", "load_prices"]

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_REMEDY = "compare with configs/prices.yml; docs/planning.md lists every key"


def _seconds(value: object) -> object:
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration; write a number with s, min, h or d, such as 5min")
    return float(match["number"]) * _SECONDS[match["unit"]]


def _decimal(value: object) -> object:
    """YAML makes a binary fraction of `0.30`; its shortest decimal form is what was written."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return str(value)


Money = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[Decimal, BeforeValidator(_decimal), Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
Count = Annotated[int, Field(ge=0, strict=True)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=_Model)


class TokenPlan(_Model):
    """Prices per million tokens.

    Attributes
    ----------
    input, output
        Of prompts and of answers.
    cached_input
        Of prompt tokens read from the provider's cache; without it there is no cache.
    cache_write
        Of prompt tokens written to the cache; by default the price of input.
    ttl
        Seconds an entry lives after it was written or read last.
    minimum_tokens
        Shorter prefixes are neither written nor read.
    breakpoints
        `automatic`: any prefix that was seen is found again, in whole blocks. `prompt`: one breakpoint at the end of
        each prompt; only whole earlier prompts are found.
    """

    input: Money
    output: Money
    cached_input: Money | None = None
    cache_write: Money | None = None
    ttl: Seconds | None = None
    minimum_tokens: Count = 0
    breakpoints: Literal["automatic", "prompt"] = "automatic"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.cached_input is None:
            spare = self.model_fields_set & {"cache_write", "ttl", "minimum_tokens", "breakpoints"}
            if spare:
                raise ValueError(f"{sorted(spare)[0]} without cached_input; add it, or leave both out")
        elif self.ttl is None:
            raise ValueError("cached_input without ttl: how long do entries live? such as ttl: 5min")
        return self


class GPUPlan(_Model):
    """Prices of hardware of one's own.

    Attributes
    ----------
    gpu_hour
        An hour of the GPU, or GPUs, that these speeds are of.
    prefill_tokens_per_s, decode_tokens_per_s
        Prompt tokens computed, and answer tokens of all requests of a batch together, per second.
    memory, memory_gib_month
        Size of the cache, and the price of a GiB of it for a month of 730 hours. Without a size there is no cache.
    bytes_per_token
        KV of one token.
    policy
        Eviction policy of the cache.
    """

    gpu_hour: Money
    prefill_tokens_per_s: Rate
    decode_tokens_per_s: Rate
    memory: Annotated[ByteSize, Field(gt=0)] | None = None
    memory_gib_month: Money = Decimal(0)
    bytes_per_token: Annotated[int, Field(ge=1, strict=True)] = 131_072
    policy: str = DEFAULT_POLICY

    @model_validator(mode="after")
    def _known_policy(self) -> Self:
        try:
            check_policy(self.policy, {})
        except ConfigError as error:
            raise ValueError(f"policy: {error}") from None
        return self


class _Heading(_Model):
    as_of: dt.date
    currency: Annotated[str, Field(min_length=1)]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PriceList:
    """Plans by name.

    Attributes
    ----------
    as_of
        The day on which somebody last looked the prices up.
    note
        Where, or what they are.
    """

    as_of: dt.date
    currency: str
    note: str
    plans: Mapping[str, TokenPlan | GPUPlan]


def load_prices(path: Path) -> PriceList:
    """Read a price list. Raises `ConfigError` naming the file, every key that is wrong, and the remedy."""
    try:
        data = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(error.message, remedy=_REMEDY) from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be a mapping with as_of, currency and plans", remedy=_REMEDY)
    faults: list[str] = []
    heading = _validate(_Heading, {key: value for key, value in data.items() if key != "plans"}, "", faults)
    raw = data.get("plans")
    plans: dict[str, TokenPlan | GPUPlan] = {}
    if not isinstance(raw, Mapping) or not raw:
        faults.append("plans: not a mapping of at least one plan")
    else:
        for name, plan in raw.items():
            valid: TokenPlan | GPUPlan | None
            if isinstance(plan, Mapping) and "gpu_hour" in plan:
                valid = _validate(GPUPlan, plan, f"plans.{name}.", faults)
            else:
                valid = _validate(TokenPlan, plan, f"plans.{name}.", faults)
            if valid is not None:
                plans[str(name)] = valid
    if heading is None or faults:
        raise ConfigError(f"{path}: {'; '.join(faults)}", remedy=_REMEDY)
    return PriceList(heading.as_of, heading.currency, heading.note, plans)


def _validate(kind: type[M], data: object, prefix: str, faults: list[str]) -> M | None:
    """Return the data as a model; or None, with every fault added to the list."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        for fault in error.errors():
            name = (prefix + ".".join(str(part) for part in fault["loc"])).rstrip(".")
            message = str(fault["msg"]).replace("Value error, ", "")
            if fault["type"] == "extra_forbidden":
                close = difflib.get_close_matches(str(fault["loc"][-1]), list(kind.model_fields), n=1)
                message = "unknown key" + (f", did you mean {close[0]!r}?" if close else "")
            faults.append(f"{name}: {message}")
        return None
