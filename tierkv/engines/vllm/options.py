"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from tierkv.config import Count, MemorySize, Seconds
from tierkv.engines.options import EngineOptions, read_options

__all__ = ["Options", "parse_options"]


class Options(EngineOptions):
    """The connector's settings.

    Attributes
    ----------
    block_tokens
        Tokens per tierkv block, a multiple of the engine's block size; None: the smallest that is at least 64.
    compute_s
        Let engines that share a daemon prefill a common prompt once, see `tierkv.cache.Cache.acquire`; 0: do not.
    staging_bytes
        Memory of each worker for blocks on their way to the cache. What does not fit is not stored.
    """

    block_tokens: Annotated[Count, Field(gt=0)] | None = None
    wait_s: Seconds = 2.0
    compute_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    extra_s: Seconds = 0.25
    staging_bytes: MemorySize = Field(default="256MiB", validate_default=True)


def parse_options(data: Mapping[str, Any]) -> Options:
    """Check what the user wrote. Raises `ConfigError` with every fault found."""
    return read_options(Options, data, "kv_connector_extra_config")
