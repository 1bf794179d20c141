"""A trace with the lengths of its answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import InvalidRequest
from tierkv.replay.trace import Trace, read_trace

__all__ = ["Traffic", "read_traffic"]

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace, and for each of its requests the tokens of the answer."""

    trace: Trace
    answers: tuple[int, ...]

    def distinct_tokens(self) -> int:
        """Prompt tokens, those of each distinct block once."""
        trace = self.trace
        seen: set[int] = set()
        tokens = 0
        for request in trace.requests:
            for depth, block in enumerate(request.blocks):
                if block not in seen:
                    seen.add(block)
                    tokens += trace.tokens(request, depth + 1) - trace.tokens(request, depth)
        return tokens

    def span_ms(self) -> int:
        """From the first request to the last, whole milliseconds."""
        requests = self.trace.requests
        return round(requests[-1].timestamp - requests[0].timestamp) if requests else 0


def read_traffic(path: Path, block_tokens: int) -> Traffic:
    """Read a trace of which every request has an `output_length`.

    Raises what `read_trace` raises, and `InvalidRequest` naming file and line where the length is missing.
    """
    trace = read_trace(path, block_tokens)
    # Sorted as the trace is: by timestamp, requests of one time in their order.
    answers = [tokens for _, tokens in sorted(_answers(path), key=lambda pair: pair[0])]
    return Traffic(trace, tuple(answers))


def _answers(path: Path) -> Iterator[tuple[float, int]]:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
    with gzip.open(path) if zipped else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = json.loads(line)
                tokens = row.get("output_length")
                if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
                    raise InvalidRequest(
                        f"{path}:{number}: 'output_length' is not a number of tokens",
                        remedy="costs need the length of every answer: use a trace that has it",
                    )
                yield row["timestamp"], tokens
