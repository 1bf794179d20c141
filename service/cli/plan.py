"""`tierkv plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.service.cli.options import JsonOption

__all__ = ["plan"]


def plan(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain or .gz: timestamp, input_length, hash_ids.")],
    ram: Annotated[str | None, typer.Option(help="Sizes of memory: 64GiB,128GiB. Default: up to all blocks.")] = None,
    disk: Annotated[str | None, typer.Option(help="Sizes of disk: 0,1TiB. Default: none, a quarter, all.")] = None,
    policy: Annotated[str, typer.Option(help="Eviction policies of memory, separated by commas.")] = "aslru,lru",
    samples: Annotated[int, typer.Option(min=1, max=32, help="Independent samples; more narrow the error bars.")] = 4,
    exact: Annotated[bool, typer.Option("--exact", help="Replay all of the trace instead: slower.")] = False,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    block_bytes: Annotated[int | None, typer.Option(min=1, help="KV of a block of the trace.")] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV of a token instead; default 131072, an 8B model.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to take the size from instead.")] = None,
    demote_ahead: Annotated[float, typer.Option(min=0, max=1, help="warm.demote_ahead of the daemon.")] = 0.25,
    prefill: Annotated[float, typer.Option(min=1, help="Tokens the engine prefills per second.")] = 8000,
    ram_gbps: Annotated[float, typer.Option(min=0.001, help="Gigabytes per second from memory.")] = 20,
    disk_gbps: Annotated[float, typer.Option(min=0.001, help="The same from disk.")] = 2,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour; asks for costs.")] = None,
    ram_gib_month: Annotated[float, typer.Option(min=0, help="Price of a GiB of memory for a month.")] = 0,
    disk_gib_month: Annotated[float, typer.Option(min=0, help="Price of a GiB of disk for a month.")] = 0,
    page: Annotated[Path | None, typer.Option("--html", help="Also write a page with plots to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan sizes of memory and disk: hit rate, time to first token and cost over them, from a trace of requests."""
    from tierkv.insight.plan.command import Asked, block_size, plan_command
    from tierkv.insight.plan.question import Prices, Speeds

    asked = Asked(
        policies=tuple(name.strip() for name in policy.split(",")),
        ram=ram,
        disk=disk,
        speeds=Speeds(prefill, ram_gbps * 1e9, disk_gbps * 1e9),
        demote_ahead=demote_ahead,
        prices=None if gpu_hour is None else Prices(gpu_hour, ram_gib_month, disk_gib_month),
        samples=0 if exact else samples,
    )
    size = block_size(block_tokens, block_bytes=block_bytes, bytes_per_token=bytes_per_token, model=model)
    plan_command(trace, block_tokens, size, asked, page=page, as_json=as_json)
