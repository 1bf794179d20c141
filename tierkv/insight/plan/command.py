"""What `tierkv plan` does: read a trace, answer under a progress bar, print or write the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tierkv.errors import ConfigError, InvalidRequest
from tierkv.insight.plan.page import check_plots, write_page
from tierkv.insight.plan.points import make_plan
from tierkv.insight.plan.question import Prices, Question, Speeds, default_sizes
from tierkv.insight.plan.report import print_plan
from tierkv.replay.trace import Trace, read_trace
from tierkv.spec import KVSpec

__all__ = ["Asked", "block_size", "parse_sizes", "plan_command"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about the question; sizes it leaves out follow from the trace.

    Attributes
    ----------
    ram, disk
        Sizes as text, such as `64GiB,128GiB`; None where not given.
    samples
        Independent samples; 0 replays all of the trace.
    """

    policies: tuple[str, ...]
    ram: str | None
    disk: str | None
    speeds: Speeds
    demote_ahead: float
    prices: Prices | None
    samples: int


def plan_command(
    path: Path, block_tokens: int, block_bytes: int, asked: Asked, *, page: Path | None, as_json: bool
) -> None:
    """Print a plan as tables or one line of JSON, and write a page if asked. Progress goes to stderr if a terminal."""
    if page is not None:
        check_plots()
    trace = read_trace(path, block_tokens)
    if not trace.requests:
        raise InvalidRequest(f"{path}: no requests in it", remedy="name a trace with at least one")
    question = _question(trace, block_bytes, asked)
    errors = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("simulate", total=len(question.setups()) * max(1, asked.samples))
        plan = make_plan(trace, question, asked.samples, lambda: bar.advance(task))
    if page is not None:
        write_page(plan, path.name, page)
    if as_json:
        sys.stdout.write(json.dumps(plan.as_json()) + "\n")
    else:
        print_plan(plan, Console())


def block_size(block_tokens: int, *, block_bytes: int | None, bytes_per_token: int | None, model: Path | None) -> int:
    """Return the bytes of a block: given, from those of a token, or from a checkpoint's configuration.

    Windowed layers count like full ones. Raises `ConfigError` if more than one is given, `InvalidRequest` for a path
    without a readable checkpoint.
    """
    given = {"--block-bytes": block_bytes, "--bytes-per-token": bytes_per_token, "--model": model}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} exclude each other", remedy="leave one of them")
    if block_bytes is not None:
        return block_bytes
    if model is not None:
        spec = KVSpec.from_pretrained(model, block_tokens=block_tokens)
        return sum(spec.layout(group).nbytes for group in range(len(spec.groups)))
    return block_tokens * (bytes_per_token or 131_072)


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return sizes in bytes from text such as `64GiB,1TiB`. Raises `ConfigError` naming the option."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    adapter = TypeAdapter(ByteSize)
    sizes = []
    for part in text.split(","):
        try:
            sizes.append(int(adapter.validate_python(part.strip())))
        except ValidationError:
            raise ConfigError(
                f"{option}: {part.strip()!r} is not a size", remedy="write sizes such as 64GiB,128GiB"
            ) from None
    return tuple(sizes)


def _question(trace: Trace, block_bytes: int, asked: Asked) -> Question:
    ram: Sequence[int]
    disk: Sequence[int]
    ram, disk = default_sizes(trace.unique_blocks() * block_bytes)
    ram = [size for size in ram if size >= block_bytes]
    if asked.ram is not None:
        ram = parse_sizes(asked.ram, "--ram")
        if 0 in ram:
            raise ConfigError("--ram: memory of 0 bytes", remedy="ask about larger sizes")
    if asked.disk is not None:
        disk = parse_sizes(asked.disk, "--disk")
    return Question(
        policies=asked.policies,
        ram_bytes=tuple(ram),
        disk_bytes=tuple(disk),
        block_bytes=block_bytes,
        block_tokens=trace.block_tokens,
        speeds=asked.speeds,
        demote_ahead=asked.demote_ahead,
        prices=asked.prices,
    )
