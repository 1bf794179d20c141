"""`tierkv cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierkv.service.cli.options import JsonOption

__all__ = ["cost"]


def cost(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain or .gz, with output_length.")],
    prices: Annotated[Path, typer.Option(help="Price list; configs/prices.yml is an example.")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Compare what a trace costs: flat prices, a provider's cache, hardware of one's own with this cache."""
    from tierkv.insight.cost.command import cost_command

    cost_command(trace, prices, block_tokens, as_json=as_json)
