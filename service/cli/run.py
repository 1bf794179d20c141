"""`tierkv serve` and `tierkv demo`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierkv import __version__
from tierkv.service.cli.options import ConfigOption, JsonFileOption, StateDirOption

__all__ = ["demo", "serve"]

SocketOption = Annotated[Path | None, typer.Option("--socket", help="Unix socket to listen on.")]


def serve(config: ConfigOption = None, socket: SocketOption = None, state_dir: StateDirOption = None) -> None:
    """Run the daemon until SIGTERM, then flush and leave nothing behind."""
    import asyncio

    from tierkv.service.daemon import run_daemon
    from tierkv.service.logs import configure_logs
    from tierkv.sources import Sources

    sources = Sources(config, os.environ, {"socket": socket, "state_dir": state_dir})
    settings = sources.read().config
    configure_logs(settings.log)

    def ready(addresses: list[str]) -> None:
        hot = f"on {settings.hot.device}" if settings.hot.capacity else "off (set hot.capacity)"
        cold = str(settings.cold.capacity.human_readable()) if settings.cold.capacity else "off (set cold.capacity)"
        typer.echo(f"tierkv {__version__} ready on {', '.join(addresses)}")
        typer.echo(f"tiers: hot {hot}, warm {settings.warm.capacity.human_readable()}, cold {cold}")
        sys.stdout.flush()

    asyncio.run(run_daemon(settings, lambda: sources.read().config, ready))


def demo(json_path: JsonFileOption = None) -> None:
    """Serve a real model through all tiers and a restart, and compare every token with an uncached run."""
    from rich.console import Console

    from tierkv.service.demo import run

    raise typer.Exit(run(json_path, Console()))
