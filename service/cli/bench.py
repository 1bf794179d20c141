"""`tierkv bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.service.cli.options import JsonFileOption

__all__ = ["app"]

app = typer.Typer(
    help="Measure tiers and codecs beside what this machine gives: memcpy, raw files, plain zstd.", no_args_is_help=True
)


@app.command("storage")
def bench_storage(
    directory: Annotated[
        Path | None, typer.Option("--directory", help="On the disk in question; else that of temporary files.")
    ] = None,
    json_path: JsonFileOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds: to see that it runs, not how fast.")] = False,
) -> None:
    """Warm and cold tier: put, get, churn, reads from the disk, reload. About a minute."""
    from rich.console import Console

    from tierkv.service.bench.results import write_json
    from tierkv.service.bench.storage import FULL, QUICK, bench_storage

    figures = bench_storage(directory, Console(), QUICK if quick else FULL)
    if json_path is not None:
        write_json(figures, json_path)


@app.command("codec")
def bench_codec(
    source: Annotated[
        Path | None,
        typer.Option("--input", help=".npy of bfloat16 bits, uint16 [layers, 2, tokens, heads, head_dim]."),
    ] = None,
    json_path: JsonFileOption = None,
) -> None:
    """Codecs on KV: ratio, speed and loss, in blocks of 64 tokens."""
    from rich.console import Console

    from tierkv.service.bench.codec import bench_codec
    from tierkv.service.bench.results import write_json

    figures = bench_codec(source, Console())
    if json_path is not None:
        write_json(figures, json_path)


@app.command("wire")
def bench_wire(
    json_path: JsonFileOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds: to see that it runs, not how fast.")] = False,
) -> None:
    """A client and a daemon of its own: shared memory, HTTP bodies, single calls. About a minute."""
    from rich.console import Console

    from tierkv.service.bench.results import write_json
    from tierkv.service.bench.wire import FULL, QUICK, bench_wire

    figures = bench_wire(Console(), QUICK if quick else FULL)
    if json_path is not None:
        write_json(figures, json_path)
