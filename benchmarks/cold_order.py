"""Eviction order of the cold tier: token hit rate of recycled segments beside an exact LRU of as many blocks.

    TIERKV_TRACES=/path/to/traces python benchmarks/cold_order.py
    python benchmarks/cold_order.py --traces DIR --trace NAME.jsonl.gz --segments 16 --segments 32

Traces are in Mooncake's format, one JSON object a line: `timestamp`, `input_length` in tokens, `hash_ids` of blocks of
512 tokens. Every block becomes one small value of a real `ColdTier`, which has room for 10, 25 or 50 % of the trace's
blocks. The LRU has as many places as all segments hold blocks when they are full for the first time; under "of held" as
many as the tier held on average: one segment is being filled, and one that is filled again takes a few blocks less.

A request hits the longest run of blocks from its first that are there when it comes; then it uses all of its blocks,
the last first: what is there is touched, the rest is stored.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tierkv.storage.cold import ColdTier
from tierkv.storage.tier import BlockMeta, checksum

TRACE_BLOCK = 512  # tokens
SHARES = (0.10, 0.25, 0.50)
PAGE = 4096
HEADER = 128  # of a container, at most
INDEX = 512  # bytes of index and reserve per block, rounded up
SMALLEST_SEGMENT = 1 << 20


def value(pages: int) -> tuple[bytes, BlockMeta]:
    """A payload whose container takes so many pages."""
    payload = bytes(pages * PAGE - HEADER)
    return payload, BlockMeta(len(payload), checksum(payload))


@dataclass(frozen=True, slots=True)
class Request:
    """Block keys of one request, and the tokens of each block."""

    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    with gzip.open(path, "rt") as lines:
        rows = sorted(map(json.loads, lines), key=lambda row: row["timestamp"])
    return [_request(row["hash_ids"], row["input_length"]) for row in rows]


def _request(hash_ids: Sequence[int], input_length: int) -> Request:
    keys = tuple(number.to_bytes(32, "little") for number in hash_ids)
    last = input_length - TRACE_BLOCK * (len(keys) - 1)
    return Request(keys, (TRACE_BLOCK,) * (len(keys) - 1) + (last,) if keys else ())


def hit_rate(
    requests: Sequence[Request], has: Callable[[bytes], bool], use: Callable[[Sequence[bytes]], None]
) -> float:
    """Replay; return the share of all tokens that were hit. `use` gets a request's keys, the last first."""
    hit = 0
    for request in requests:
        for key, tokens in zip(request.keys, request.tokens, strict=True):
            if not has(key):
                break
            hit += tokens
        use(request.keys[::-1])
    return hit / sum(sum(request.tokens) for request in requests)


def lru(requests: Sequence[Request], places: int) -> float:
    order: OrderedDict[bytes, None] = OrderedDict()

    def use(keys: Sequence[bytes]) -> None:
        for key in keys:
            order[key] = None
            order.move_to_end(key)
            if len(order) > places:
                order.popitem(last=False)

    return hit_rate(requests, order.__contains__, use)


def cold(requests: Sequence[Request], pages: int, segment_bytes: int, segments: int) -> tuple[float, float]:
    """Return the hit rate, and the mean number of blocks that were there once the store was full."""
    held: list[int] = []
    payload, meta = value(pages)
    with tempfile.TemporaryDirectory() as path:
        tier = open_tier(path, segment_bytes, segments)

        def use(keys: Sequence[bytes]) -> None:
            there = [key for key in keys if tier.meta(key) is not None]
            tier.touch(there)
            missing = [(key, payload, meta) for key in keys if tier.meta(key) is None]
            refused = [error for error in tier.put_many(missing) if error is not None]
            if refused:
                raise refused[0]
            held.append(tier.usage().blocks)

        try:
            rate = hit_rate(requests, lambda key: tier.meta(key) is not None, use)
        finally:
            tier.close()
    full = [count for count in held if count > 0.8 * max(held)]
    return rate, sum(full) / len(full)


def open_tier(path: str, segment_bytes: int, segments: int) -> ColdTier:
    per_segment = segment_bytes + segment_bytes // 256 + (64 << 10)
    capacity = segments * per_segment + (64 << 10)
    return ColdTier(path, capacity_bytes=capacity, segment_bytes=segment_bytes, codec="raw", sync="none")


def blocks_in_a_segment(pages: int, segment_bytes: int) -> int:
    """Fill one segment and count."""
    payload, meta = value(pages)
    with tempfile.TemporaryDirectory() as path:
        tier = open_tier(path, segment_bytes, 4)
        try:
            for number in range(1 << 30):
                tier.put(number.to_bytes(32, "little"), payload, meta)
                sealed = [segment.blocks for segment in tier.segments() if segment.state == "sealed"]
                if sealed:
                    return sealed[0]
        finally:
            tier.close()
    raise AssertionError("a segment never filled up")


def rows(requests: Sequence[Request], wanted_segments: Sequence[int]) -> Iterator[list[str]]:
    unique = len({key for request in requests for key in request.keys})
    for share in SHARES:
        for wanted in wanted_segments:
            in_each = share * unique / wanted
            pages = max(1, ceil((SMALLEST_SEGMENT / in_each - INDEX) / PAGE))
            segment_bytes = int(in_each * (pages * PAGE + INDEX)) // PAGE * PAGE
            per_segment = blocks_in_a_segment(pages, segment_bytes)
            segments = max(4, round(share * unique / per_segment))
            places = segments * per_segment
            exact = lru(requests, places)
            rate, held = cold(requests, pages, segment_bytes, segments)
            of_held = lru(requests, round(held))
            figures = [
                f"{exact:.4f}",
                f"{of_held:.4f}",
                f"{rate:.4f}",
                f"{rate - exact:+.4f}",
                f"{rate - of_held:+.4f}",
            ]
            yield [f"{share:.0%}", str(segments), str(places), f"{held:.0f}", *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the cold tier's eviction order with LRU on traces.")
    parser.add_argument("--traces", default=os.environ.get("TIERKV_TRACES"), help="directory (default: $TIERKV_TRACES)")
    parser.add_argument("--trace", action="append", help="file name; default: every *.jsonl.gz there")
    parser.add_argument("--segments", type=int, action="append", help="segments of the store (default: 32)")
    options = parser.parse_args()
    if not options.traces or not Path(options.traces).is_dir():
        parser.error("no traces: set TIERKV_TRACES or --traces to a directory of them")
    directory = Path(options.traces)
    names = options.trace or sorted(path.name for path in directory.glob("*.jsonl.gz"))
    for name in names:
        requests = read_trace(directory / name)
        table = Table(title=f"{name}: token hit rate")
        for heading in ("share", "segments", "blocks", "held", "LRU", "of held", "tier", "to LRU", "to held"):
            table.add_column(heading, justify="right")
        for row in rows(requests, options.segments or [32]):
            table.add_row(*row)
        Console().print(table)


if __name__ == "__main__":
    main()
