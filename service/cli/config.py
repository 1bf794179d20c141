"""`tierkv config`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from tierkv.service.cli.options import ConfigOption, StateDirOption

__all__ = ["app"]

app = typer.Typer(help="Write, check and explain configurations.", no_args_is_help=True)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write, - for standard output.")] = Path("tierkv.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write a file with every setting, its default and what it is for."""
    from tierkv.service.new_config import default_text, write_default

    if str(path) == "-":
        typer.echo(default_text(), nl=False)
    else:
        write_default(path, force=force)
        typer.echo(f"wrote {path}; start with: tierkv serve --config {path}")


@app.command()
def validate(path: Annotated[Path, typer.Argument(help="YAML file.", metavar="FILE")]) -> None:
    """Check a file, without the environment. Exit code 2 and every mistake if there are any."""
    from tierkv.config import load_config
    from tierkv.core.build import check_tiers

    check_tiers(load_config(path))
    typer.echo(f"{path} is valid")


@app.command()
def show(config: ConfigOption = None, state_dir: StateDirOption = None) -> None:
    """Print the effective settings as YAML, and where each comes from: file, environment, option or default."""
    from tierkv.sources import Sources, to_yaml

    typer.echo(to_yaml(Sources(config, os.environ, {"state_dir": state_dir}).read()), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors and CI."""
    from tierkv.sources import schema

    typer.echo(json.dumps(schema(), indent=2))
