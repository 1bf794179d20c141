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
    from tierkv.connected import ConnectedCache

__all__ = ["Cache", "Chain", "KVGroup", "KVSpec", "TierKVError", "connect", "open"]

__version__ = "0.1.0"


def open(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    tenant: str = "default",
    on_device: bool = False,
) -> Cache:
    """Open a cache embedded in this process.

    Parameters
    ----------
    config
        A `tierkv.config.Config`, plain settings, the path of a YAML file, or None for an in-memory cache of 1 GiB.
    tenant
        Whose blocks this cache sees.
    on_device
        Read blocks that are in a hot tier on a GPU there, by `ReadLease.device_view`; else only their copies in memory
        are pinned. `ReadLease.view` then copies such blocks back.

    Raises `ConfigError`, or what the tiers raise when they cannot be opened. Blocks while memory is allocated.
    """
    from tierkv.config import Config, load_config, parse_config
    from tierkv.embedded import open_cache

    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = parse_config(config or {})
    return open_cache(config, tenant, on_device=on_device)


def connect(
    url: str,
    *,
    tenant: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout_s: float = 5.0,
    fail_open: bool = False,
    extra_s: float = 0.05,
    on_device: bool = False,
) -> ConnectedCache:
    """Connect to a daemon.

    Parameters
    ----------
    url
        ``unix:///path/to/socket``, ``http://127.0.0.1:port`` or ``https://host:port``. Over a Unix socket block bytes
        move through shared memory, over TCP as HTTP bodies.
    tenant
        Whose blocks this cache sees; None: the token's tenant, or ``default``.
    token
        What a daemon that has tokens asks for; None: what the environment variable ``TIERKV_TOKEN`` holds, if anything.
    ca
        PEM file of the authority that signed the daemon's certificate; None: those this machine trusts.
    timeout_s
        Longest time to wait for an answer beyond the waiting a call itself asks for, in seconds.
    fail_open
        Return a `tierkv.client.failopen.FailOpenCache`: every failure is a miss, whether there is a daemon or not.
    extra_s
        With `fail_open`: longest time of a call beyond the waiting that it asks for, in seconds, whatever happens.
    on_device
        As for `open`, on the daemon's GPU: over a Unix socket, and if this process can open that GPU's memory.

    Raises `InvalidRequest` for a URL of another form and `Unavailable` when no daemon answers. Blocks for one request.
    """
    if fail_open:
        from tierkv.client.failopen import FailOpenCache

        return FailOpenCache.connect(
            url, tenant=tenant, token=token, ca=ca, timeout_s=timeout_s, extra_s=extra_s, on_device=on_device
        )
    from tierkv.client import connect as connect_client

    return connect_client(url, tenant=tenant, token=token, ca=ca, timeout_s=timeout_s, on_device=on_device)
