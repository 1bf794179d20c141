"""tierkv: a tiered key/value cache for LLM inference.

    cache = tierkv.open()                                 in this process
    cache = tierkv.connect("unix:///run/tierkv.sock")     through a daemon: the same interface

See `tierkv.cache` for the contract, `tierkv.spec` and `tierkv.keys` for identity, `tierkv.errors` for every error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierkv.cache import Cache, Chain
from tierkv.errors import TierKVError
from tierkv.spec import KVGroup, KVSpec

if TYPE_CHECKING:
    from tierkv.config import Config

__all__ = ["Cache", "Chain", "KVGroup", "KVSpec", "TierKVError", "connect", "open"]

__version__ = "0.1.0"


def open(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, *, tenant: str = "default"
) -> Cache:
    """Open a cache embedded in this process.

    Parameters
    ----------
    config
        A `tierkv.config.Config`, plain settings, the path of a YAML file, or None for an in-memory cache of 1 GiB.
    tenant
        Whose blocks this cache sees.

    Raises `ConfigError`, or what the tiers raise when they cannot be opened. Blocks while memory is allocated.
    """
    from tierkv.config import Config, load_config, parse_config
    from tierkv.embedded import open_cache

    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = parse_config(config or {})
    return open_cache(config, tenant)


def connect(url: str, *, tenant: str = "default", timeout_s: float = 5.0) -> Cache:
    """Connect to a daemon.

    Parameters
    ----------
    url
        ``unix:///path/to/socket`` or ``http://127.0.0.1:port``. Over a Unix socket block bytes move through shared
        memory, over TCP as HTTP bodies.
    tenant
        Whose blocks this cache sees.
    timeout_s
        Longest time to wait for an answer beyond the waiting a call itself asks for, in seconds.

    Raises `InvalidRequest` for a URL of another form and `Unavailable` when no daemon answers. Blocks for one request.
    """
    from tierkv.client import connect as connect_client

    return connect_client(url, tenant=tenant, timeout_s=timeout_s)
