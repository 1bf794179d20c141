"""SIGHUP: read the configuration again and go on with what can change in a running daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import reduce

from tierkv.config import Config
from tierkv.core.build import bounds, tenant_rules
from tierkv.errors import ConfigError, TierKVError
from tierkv.service.context import Context
from tierkv.service.logs import configure_logs
from tierkv.sources import leaves

__all__ = ["reload"]

log = logging.getLogger(__name__)

_LIVE = ("auth", "limits", "load_bytes", "log", "tenants")


def reload(context: Context, reread: Callable[[], Config]) -> None:
    """Read tokens again, apply what `reread` returns as far as possible, and log what would need a restart.

    What cannot be read or is wrong changes nothing and is logged. Blocks on files; one call at a time.
    """
    try:
        context.authority.reload()
    except TierKVError as error:
        log.error("tokens not reloaded: the old ones stay", extra={"detail": str(error)})
    try:
        wanted = reread()
    except ConfigError as error:
        log.error("configuration not reloaded: the old one stays", extra={"detail": str(error)})
        return
    running = context.config
    changed = [name for name in leaves(Config) if _value(running, name) != _value(wanted, name)]
    live = [name for name in changed if name.partition(".")[0] in _LIVE]
    dead = [name for name in changed if name not in live]
    if context.engine.regrant(tenant_rules(wanted), bounds(wanted), wanted.load_bytes):
        dead.append("tenants.*.scope")  # logs never name tenants
    for name in dead:
        log.warning("setting needs a restart", extra={"setting": name})
    configure_logs(wanted.log)
    context.config = running.model_copy(update={name: getattr(wanted, name) for name in _LIVE})
    log.info("configuration reloaded", extra={"changed": ",".join(live) or "nothing"})


def _value(config: Config, name: str) -> object:
    return reduce(getattr, name.split("."), config)
