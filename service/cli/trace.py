"""`tierkv trace`: record the traffic of a daemon, and make of recordings what can be given away."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from tierkv.service.cli.options import UrlOption

__all__ = ["app"]

app = typer.Typer(help="Traces of the traffic, in Mooncake's format: no tokens, no names.", no_args_is_help=True)


@app.command()
def record(
    url: UrlOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new file; only this user may read it.")],
    seconds: Annotated[float | None, typer.Option(min=0, help="How long; without it until Ctrl-C.")] = None,
) -> None:
    """Follow a running daemon's requests into a file."""
    from tierkv.service.recording import record

    asked: list[int] = []  # not an exception: what was asked for last is still to be written
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: asked.append(received))
    done = record(url, output, seconds, lambda: bool(asked))
    missing = f", {done.missed} more missed" if done.missed else ""
    gaps = f", {done.gaps} gaps of unknown length" if done.gaps else ""
    typer.echo(f"{done.requests} requests in {output}{missing}{gaps}")


@app.command()
def export(
    sources: Annotated[list[Path], typer.Argument(help="Recorded files, or the directory of insight.trace.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new file; compressed if it ends in .gz.")],
    skip: Annotated[float, typer.Option(min=0, help="Leave out so many seconds at the beginning.")] = 0.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Leave out what comes so much later.")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Make blocks of so many tokens, a multiple of those recorded.")
    ] = None,
    no_tenants: Annotated[bool, typer.Option("--no-tenants", help="Leave out whose requests they are.")] = False,
    no_sessions: Annotated[bool, typer.Option("--no-sessions", help="Leave out which conversation's.")] = False,
) -> None:
    """Merge recordings into one trace that can be given away: blocks numbered, names hashed anew, times from 0."""
    from tierkv.insight.traces.export import export

    made = export(
        sources,
        output,
        skip_s=skip,
        seconds=seconds,
        block_tokens=block_tokens,
        tenants=not no_tenants,
        sessions=not no_sessions,
    )
    if made.cut_lines:
        typer.echo(f"left out {made.cut_lines} lines that were not written to their end", err=True)
    typer.echo(f"{made.requests} requests over {made.seconds:.0f} s, {made.blocks} distinct blocks")
    typer.echo(f"replay it: tierkv replay {output} --block-tokens {made.block_tokens}")
