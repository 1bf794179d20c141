"""Commands that look: at a running daemon, at what one left, at the machine. And `clear`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Annotated

import typer

from tierkv.service.cli.options import ConfigOption, JsonOption, StateDirOption, UrlOption

__all__ = ["clear", "doctor", "health", "insight", "inspect", "status", "top"]


def status(url: UrlOption, as_json: JsonOption = False) -> None:
    """Show a running daemon's tiers, hits and leases."""
    import tierkv
    from tierkv.service.status import print_status

    with tierkv.connect(url) as cache:
        stats = cache.stats()
    if as_json:
        typer.echo(json.dumps(stats))
    else:
        print_status(stats)


def health(url: UrlOption) -> None:
    """Exit with 0 if a daemon takes requests, with 8 if not. Needs no token."""
    from tierkv.client import connect

    connect(url).close()
    typer.echo("ok")


def top(
    url: UrlOption,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, since the daemon's start, and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds from frame to frame.")] = 2.0,
) -> None:
    """Watch a running daemon: tiers, hit rates, loads, leases, tenants over the last ten seconds. Ctrl-C ends it."""
    from rich.console import Console

    from tierkv.service.top import show

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job would ignore it
    try:
        show(url, interval, Console(), once=once)
    except KeyboardInterrupt:
        raise typer.Exit from None


def insight(
    url: UrlOption,
    last: Annotated[
        str | None, typer.Option(help="Only so long, such as 1h, at most 24h; default: since the daemon's start.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show why prompts were not cached, where they leave their templates, and what more room would have given."""
    from rich.console import Console

    from tierkv.service.insight import ask_insight, parse_last, print_insight

    found = ask_insight(url, parse_last(last) if last is not None else None)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_insight(found, Console())


def inspect(
    url: Annotated[str | None, typer.Argument(help="Daemon to ask.", envvar="TIERKV_URL")] = None,
    state_dir: StateDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show namespaces, tenants and segments: of a running daemon, or, with --state-dir or --config, of a cold store.

    A cold store is only read, and only if no process has it open.
    """
    from rich.console import Console

    from tierkv.service.inspect import inspect_daemon, inspect_files, print_daemon, print_store

    if url is not None and state_dir is None and config is None:
        found, show = inspect_daemon(url), print_daemon
    else:
        found, show = inspect_files(config, state_dir), print_store
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found, Console())


def clear(
    url: UrlOption,
    namespace: Annotated[str, typer.Option("--namespace", help="Its name, or the first digits of it.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose blocks.")] = "default",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a tenant's blocks of a namespace from every tier of a running daemon."""
    from tierkv.service.inspect import clear

    if not yes:
        question = f"Remove all blocks of tenant {tenant} in namespace {namespace} at {url}?"
        if not sys.stdin.isatty() or not typer.confirm(question):
            typer.echo("nothing was removed; --yes goes without asking", err=True)
            raise typer.Exit(2)
    name, removed = clear(url, namespace, tenant)
    typer.echo(f"removed {removed} blocks of {tenant} in {name}")


def doctor(config: ConfigOption = None, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Check whether this machine is fit for a configuration. Exit code 0: all is well, 1: warnings, 2: failures."""
    from dataclasses import asdict

    from rich.console import Console

    from tierkv.service.doctor import examine, exit_code
    from tierkv.service.doctor.report import print_findings
    from tierkv.sources import Sources

    findings = examine(Sources(config, os.environ, {"state_dir": state_dir}).read().config)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        print_findings(findings, Console())
    raise typer.Exit(exit_code(findings))
