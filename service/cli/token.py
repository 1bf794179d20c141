"""`tierkv token`: who may call a daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.errors import ConfigError, InvalidRequest
from tierkv.service.cli.options import ConfigOption

if TYPE_CHECKING:
    from tierkv.service.tokens import Role, TokenFile

__all__ = ["app"]

app = typer.Typer(help="Make, list and revoke the tokens of a daemon.", no_args_is_help=True)

DirectoryOption = Annotated[
    Path | None, typer.Option("--state-dir", help="The daemon's state directory, if not that of the configuration.")
]


@app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Whose blocks its bearer works with.")],
    role: Annotated[str, typer.Option(help="engine, reader (only looks) or operator (everything, for any tenant).")],
    config: ConfigOption = None,
    state_dir: DirectoryOption = None,
) -> None:
    """Make a token and print it, once. From the first one on, the daemon serves nobody without a token."""
    typer.echo(_file(config, state_dir).create(tenant, _role(role)))
    typer.echo("Have a running daemon read it: SIGHUP, or restart.", err=True)


@app.command("list")
def show(config: ConfigOption = None, state_dir: DirectoryOption = None) -> None:
    """Show the tokens there are: id, role, tenant and age, not the secrets."""
    from rich.console import Console
    from rich.table import Table

    file = _file(config, state_dir)
    tokens = file.read()
    if tokens is None:
        typer.echo(f"{file.path} does not exist: nobody needs a token")
        return
    table = Table("id", "role", "tenant", "created")
    for token in tokens:
        table.add_row(token.id, token.role, token.tenant, token.created)
    Console().print(table)


@app.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The 8 digits between tkv_ and the secret.")],
    config: ConfigOption = None,
    state_dir: DirectoryOption = None,
) -> None:
    """Take a token back. Without any left, nobody is served; remove tokens.yaml to go on without tokens."""
    gone = _file(config, state_dir).revoke(token_id)
    typer.echo(f"{gone.id} of tenant {gone.tenant} ({gone.role}) is revoked")
    typer.echo("Have a running daemon read it: SIGHUP, or restart.", err=True)


def _file(config: Path | None, state_dir: Path | None) -> TokenFile:
    from tierkv.service.tokens import TokenFile
    from tierkv.sources import Sources

    directory = Sources(config, os.environ, {"state_dir": state_dir}).read().config.state_dir
    if directory is None:
        raise ConfigError(
            "tokens are kept in the state directory, and none is named", remedy="give --config or --state-dir"
        )
    return TokenFile(directory)


def _role(name: str) -> Role:
    from tierkv.service.tokens import ROLES

    for role in ROLES:
        if role == name:
            return role
    raise InvalidRequest(f"{name!r} is not a role", remedy=f"use {', '.join(ROLES)}")
