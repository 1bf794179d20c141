"""The demo's phases, one after the other, on one model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.cache import Cache, Chain
from tierkv.engines.transformers import Generation, generate
from tierkv.errors import TierKVError
from tierkv.service.demo.daemon import Daemon
from tierkv.service.demo.model import LoadedModel, find_checkpoint, load_model
from tierkv.service.demo.report import Report, RequestReport, print_report, write_json
from tierkv.service.demo.scenario import TURNS, Scenario

__all__ = ["TIERS", "demonstrate"]

NEW_TOKENS = 12
TEAM, STRANGER = "team", "stranger"
TIERS: dict[str, dict[str, Any]] = {
    # The longest prompt takes 150 MiB, all of them together 190: the hot tier holds less than a prompt and the warm
    # tier less than all, so blocks have to go down to disk and come back.
    "hot": {"capacity": "96MiB", "device": "cpu"},
    "warm": {"capacity": "176MiB"},
    "cold": {"capacity": "2GiB", "codec": "bx1"},
}

Prompts = Mapping[str, list[int]]
Answers = Mapping[str, Generation]


def demonstrate(json_path: Path | None, console: Console, *, keep: bool) -> int:
    """See `tierkv.service.demo.run`."""
    checkpoint = find_checkpoint()
    with _workplace(console, keep) as directory, _progress(console) as progress:
        loading = progress.add_task("loading SmolLM2-135M-Instruct", total=1)
        loaded = load_model(checkpoint)
        progress.update(loading, completed=1)
        scenario = Scenario(loaded.tokenizer)
        prompts, uncached = _without_cache(loaded, scenario, progress)
        engine = _Engine(loaded, scenario.unrelated(), progress)
        with Daemon(directory, TIERS) as daemon:
            with _tenant(daemon, TEAM, loaded) as cache:
                cold = engine.serve(cache, prompts, "first pass through tierkv")
                warm = engine.serve(cache, prompts, "same requests again")
                first_life = cache.stats()
            restarting = progress.add_task("stopping and restarting the daemon", total=1)
            daemon.stop()
            daemon.start()
            progress.update(restarting, completed=1)
            with _tenant(daemon, TEAM, loaded) as cache:
                restart = engine.serve(cache, prompts, "after the restart, from disk")
                cache.flush()
                second_life = cache.stats()
            with _tenant(daemon, STRANGER, loaded) as cache:
                other = engine.serve(cache, {STRANGER: prompts[TURNS[0].id]}, "another tenant")[STRANGER]
    requests = [
        RequestReport(turn.id, turn.user, uncached[turn.id], cold[turn.id], warm[turn.id], restart[turn.id])
        for turn in TURNS
    ]
    same = other.tokens == uncached[TURNS[0].id].tokens
    report = Report(requests, other, same, (first_life, second_life))
    print_report(report, console)
    if json_path is not None:
        write_json(report, json_path)
    return report.exit_code


def _without_cache(loaded: LoadedModel, scenario: Scenario, progress: Progress) -> tuple[Prompts, Answers]:
    """Answer every turn without a cache; the answers become part of the prompts of later turns."""
    prompts: dict[str, list[int]] = {}
    answers: dict[str, Generation] = {}
    task = progress.add_task("without a cache", total=len(TURNS))
    for turn in TURNS:
        prompts[turn.id] = scenario.prompt(turn, prompts, {name: answer.tokens for name, answer in answers.items()})
        answers[turn.id] = generate(loaded.model, None, loaded.spec, prompts[turn.id], NEW_TOKENS)
        progress.advance(task)
    return prompts, answers


class _Engine:
    """Answers requests one by one; each arrives, and is prefetched, while the one before it is being answered.

    Before the first one stands a request that has nothing to do with them and uses no cache.
    """

    def __init__(self, loaded: LoadedModel, unrelated: list[int], progress: Progress) -> None:
        self._model, self._spec = loaded.model, loaded.spec
        self._unrelated = unrelated
        self._progress = progress

    def serve(self, cache: Cache, prompts: Prompts, title: str) -> Answers:
        task = self._progress.add_task(title, total=len(prompts))
        answers: dict[str, Generation] = {}
        waiting = iter(prompts.items())
        following = self._arrive(cache, waiting)
        generate(self._model, None, self._spec, self._unrelated, NEW_TOKENS)
        while following is not None:
            (name, prompt), following = following, self._arrive(cache, waiting)
            answers[name] = generate(self._model, cache, self._spec, prompt, NEW_TOKENS)
            self._progress.advance(task)
        return answers

    def _arrive(self, cache: Cache, waiting: Iterator[tuple[str, list[int]]]) -> tuple[str, list[int]] | None:
        request = next(waiting, None)
        if request is not None:
            with suppress(TierKVError):  # a prefetch that fails is a load that is not hidden
                cache.prefetch(Chain.of(self._spec, request[1]))
        return request


@contextmanager
def _tenant(daemon: Daemon, name: str, loaded: LoadedModel) -> Iterator[Cache]:
    with daemon.connect(name) as cache:
        cache.register(loaded.spec)
        yield cache


@contextmanager
def _workplace(console: Console, keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
    try:
        yield directory
    finally:
        if keep:
            console.print(f"kept {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
