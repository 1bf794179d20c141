"""What `tierkv cost` does: read a trace and a price list, print the bills."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from tierkv.errors import InvalidRequest
from tierkv.insight.cost.bill import compare
from tierkv.insight.cost.prices import load_prices
from tierkv.insight.cost.report import print_comparison
from tierkv.insight.cost.traffic import read_traffic

__all__ = ["cost_command"]


def cost_command(path: Path, prices: Path, block_tokens: int, *, as_json: bool) -> None:
    """Print what a trace costs by every plan of a price list, as a table or one line of JSON.

    Raises what `load_prices` and `read_traffic` raise, and `InvalidRequest` for a trace without requests.
    """
    plans = load_prices(prices)
    traffic = read_traffic(path, block_tokens)
    if not traffic.trace.requests:
        raise InvalidRequest(f"{path}: no requests in it", remedy="name a trace with at least one")
    found = compare(traffic, plans)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
    else:
        print_comparison(found, Console())
