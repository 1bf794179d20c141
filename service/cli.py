"""The command line. Commands are thin: each calls one function of the package that does the work."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tierkv import __version__
from tierkv.errors import TierKVError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tierkv",
    help="A tiered key/value cache for LLM inference: GPU pages, shared memory, compressed LMDB.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer(
    help="Measure tiers and codecs beside what this machine gives: memcpy, raw files, plain zstd.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; see configs/default.yaml.")]
SocketOption = Annotated[Path | None, typer.Option("--socket", help="Unix socket to listen on.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]
UrlOption = Annotated[
    str, typer.Option("--url", envvar="TIERKV_URL", help="unix:///path/to/socket or http://127.0.0.1:port")
]
StateDirOption = Annotated[Path | None, typer.Option("--state-dir", help="Where the secret and the cold tier live.")]


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


@app.command()
def serve(config: ConfigOption = None, socket: SocketOption = None, state_dir: StateDirOption = None) -> None:
    """Run the daemon until SIGTERM, then flush and leave nothing behind."""
    import asyncio

    from tierkv.config import load_config, parse_config
    from tierkv.service.daemon import run_daemon

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = load_config(config) if config else parse_config({})
    changes = {name: value for name, value in (("socket", socket), ("state_dir", state_dir)) if value is not None}
    settings = settings.model_copy(update=changes)

    def ready(addresses: list[str]) -> None:
        hot = f"on {settings.hot.device}" if settings.hot.capacity else "off (set hot.capacity; it needs torch)"
        cold = str(settings.cold.capacity.human_readable()) if settings.cold.capacity else "off (set cold.capacity)"
        typer.echo(f"tierkv {__version__} ready on {', '.join(addresses)}")
        typer.echo(f"tiers: hot {hot}, warm {settings.warm.capacity.human_readable()}, cold {cold}")
        sys.stdout.flush()

    asyncio.run(run_daemon(settings, ready))


@app.command()
def status(
    url: UrlOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw stats.")] = False,
) -> None:
    """Show a running daemon's tiers, hits and leases."""
    import tierkv
    from tierkv.service.status import print_status

    with tierkv.connect(url) as cache:
        stats = cache.stats()
    if as_json:
        typer.echo(json.dumps(stats))
    else:
        print_status(stats)


@app.command()
def demo(json_path: JsonOption = None) -> None:
    """Serve a real model through all tiers and a restart, and compare every token with an uncached run."""
    from rich.console import Console

    from tierkv.service.demo import run

    raise typer.Exit(run(json_path, Console()))


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain or .gz: timestamp, input_length, hash_ids.")],
    policy: Annotated[str | None, typer.Option(help="lru, slru (default), aslru, s3fifo or arc.")] = None,
    protected: Annotated[float | None, typer.Option(help="slru: protected share, default 0.3.")] = None,
    ghost: Annotated[float | None, typer.Option(help="slru, s3fifo: capacities of ghosts, default 2 and 1.")] = None,
    small: Annotated[float | None, typer.Option(help="s3fifo: share of the small queue, default 0.1.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Share of the trace's distinct blocks, default 5%.")] = None,
    capacity_blocks: Annotated[int | None, typer.Option(min=1, help="Capacity in blocks instead.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Replay the tiers of this configuration instead.")
    ] = None,
    end_hints: Annotated[bool, typer.Option("--end-hints", help="Retire a session's own blocks at its end.")] = False,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    bytes_per_token: Annotated[int, typer.Option(min=1, help="KV of one token; default: an 8B model.")] = 131072,
    prefill: Annotated[float, typer.Option(min=1, help="Tokens the engine prefills per second.")] = 8000,
    hot_gbps: Annotated[float, typer.Option(min=0.001, help="Gigabytes per second from the hot tier.")] = 400,
    warm_gbps: Annotated[float, typer.Option(min=0.001, help="The same from the warm tier.")] = 20,
    cold_gbps: Annotated[float, typer.Option(min=0.001, help="The same from the cold tier.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Replay a trace of requests: what a policy, or the tiers of a configuration, would have found."""
    from tierkv.replay.command import choose_policy, choose_tiers, run_command

    given = {"protected": protected, "ghost": ghost, "small": small}
    parameters = {name: value for name, value in given.items() if value is not None}
    if config is None:
        choice = choose_policy(policy, parameters, capacity, capacity_blocks)
    else:
        bandwidths = {"hot": hot_gbps * 1e9, "warm": warm_gbps * 1e9, "cold": cold_gbps * 1e9}
        unused = (policy, capacity, capacity_blocks, *given.values())
        choice = choose_tiers(config, unused, bytes_per_token, prefill, bandwidths)
    run_command(trace, block_tokens, choice, end_hints=end_hints, as_json=as_json)


@bench_app.command("storage")
def bench_storage(
    directory: Annotated[
        Path | None, typer.Option("--directory", help="On the disk in question; else that of temporary files.")
    ] = None,
    json_path: JsonOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds: to see that it runs, not how fast.")] = False,
) -> None:
    """Warm and cold tier: put, get, churn, reads from the disk, reload. About a minute."""
    from rich.console import Console

    from tierkv.service.bench.results import write_json
    from tierkv.service.bench.storage import FULL, QUICK, bench_storage

    figures = bench_storage(directory, Console(), QUICK if quick else FULL)
    if json_path is not None:
        write_json(figures, json_path)


@bench_app.command("codec")
def bench_codec(
    source: Annotated[
        Path | None,
        typer.Option("--input", help=".npy of bfloat16 bits, uint16 [layers, 2, tokens, heads, head_dim]."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Codecs on KV: ratio, speed and loss, in blocks of 64 tokens."""
    from rich.console import Console

    from tierkv.service.bench.codec import bench_codec
    from tierkv.service.bench.results import write_json

    figures = bench_codec(source, Console())
    if json_path is not None:
        write_json(figures, json_path)
