"""`tierkv doctor`: is this machine fit for this configuration? Each check says ok, warn or fail, with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tierkv.config import Config
from tierkv.core.build import check_tiers
from tierkv.errors import ConfigError
from tierkv.service.doctor import addresses, cluster, disk, memory, software
from tierkv.service.doctor.finding import Finding, exit_code, fail, ok

__all__ = ["Finding", "examine", "exit_code"]


def examine(config: Config) -> list[Finding]:
    """Run every check. Starts nothing and keeps nothing: test files are removed. Blocks for some seconds."""
    checks: tuple[Callable[[Config], Iterator[Finding]], ...] = (
        _settings,
        software.check,
        memory.check,
        disk.check,
        addresses.check,
        cluster.check,
    )
    return [finding for check in checks for finding in check(config)]


def _settings(config: Config) -> Iterator[Finding]:
    try:
        check_tiers(config)
    except ConfigError as error:
        yield fail("settings", error.message, error.remedy)
    else:
        yield ok("settings", "they go together")
