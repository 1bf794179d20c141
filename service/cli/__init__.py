"""The command line. Commands are thin: each calls one function of the package that does the work.

One module per subject; this one puts them together.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from tierkv import __version__
from tierkv.errors import TierKVError
from tierkv.service.cli import audit, bench, config, token, trace
from tierkv.service.cli.cost import cost
from tierkv.service.cli.engine_args import engine_args
from tierkv.service.cli.lint import lint
from tierkv.service.cli.plan import plan
from tierkv.service.cli.replay import replay
from tierkv.service.cli.run import demo, serve
from tierkv.service.cli.watch import clear, doctor, health, insight, inspect, status, top

__all__ = ["app", "main"]

app = typer.Typer(
    name="tierkv",
    help="A tiered key/value cache for LLM inference: GPU pages, shared memory, compressed LMDB.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run a command; errors end with their class's exit code and one line that names the remedy."""
    try:
        app()
    except TierKVError as error:
        _fail(error)


def _fail(error: TierKVError) -> NoReturn:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", "bold red").append(error.message, "default not bold"))
    if error.remedy:
        console.print(Text("remedy: ", "bold").append(error.remedy, "not bold"))
    sys.exit(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_COMMANDS = (
    *(serve, status, health, top, insight, inspect, clear, doctor),
    *(engine_args, demo, replay, plan, cost, lint),
)
for command in _COMMANDS:
    app.command()(command)
app.add_typer(audit.app, name="audit")
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(token.app, name="token")
app.add_typer(trace.app, name="trace")
