"""What `tierkv replay` does: read a trace, replay it under a progress bar, print the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tierkv.config import Config, HotConfig, WarmConfig, load_config
from tierkv.errors import ConfigError
from tierkv.policy import DEFAULT_POLICY, check_policy
from tierkv.replay.costs import Costs
from tierkv.replay.report import print_outcome
from tierkv.replay.run import Outcome, capacity_in_blocks, run_policy, run_tiers
from tierkv.replay.tiers import MemoryPlan, TierPlan
from tierkv.replay.trace import Trace, read_trace

__all__ = [
    "Choice",
    "checked_config",
    "checked_policy",
    "choose_policy",
    "choose_tiers",
    "policy_label",
    "progress_bar",
    "run_command",
    "tier_plan",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to replay: a label for the table, and the replay itself (of a trace, with or without end hints)."""

    label: str
    run: Callable[[Trace, bool, Callable[[int], None]], Outcome]


def choose_policy(
    policy: str | None, parameters: Mapping[str, float], share: str | None, capacity_blocks: int | None
) -> Choice:
    """Choose one cache: `slru` of 5 % of the trace's blocks, where nothing else is said. Raises `ConfigError`."""
    name = checked_policy(policy, parameters, share, capacity_blocks)

    def run(trace: Trace, end_hints: bool, progress: Callable[[int], None]) -> Outcome:
        capacity = capacity_blocks or capacity_in_blocks(trace, share or "5%")
        return run_policy(trace, name, capacity, parameters, end_hints=end_hints, progress=progress)

    return Choice(policy_label(name, parameters), run)


def checked_policy(
    policy: str | None, parameters: Mapping[str, float], share: str | None, capacity_blocks: int | None
) -> str:
    """Return the name of the policy to replay. Raises `ConfigError` for options that cannot be, or not together."""
    name = policy or ("slru" if parameters else DEFAULT_POLICY)
    check_policy(name, parameters)
    if share is not None and capacity_blocks is not None:
        raise ConfigError("--capacity and --capacity-blocks exclude each other", remedy="leave one of them out")
    return name


def policy_label(name: str, parameters: Mapping[str, float]) -> str:
    """Name a policy and its parameters for a table."""
    return " ".join([name, *(f"{key}={value:g}" for key, value in parameters.items())])


def choose_tiers(
    config: Path, unused: Iterable[object], bytes_per_token: int, prefill: float, bandwidths: Mapping[str, float]
) -> Choice:
    """Choose the tiers of a configuration file. Raises `ConfigError`, also if one of the `unused` options is given."""
    settings = checked_config(config, unused)

    def run(trace: Trace, end_hints: bool, progress: Callable[[int], None]) -> Outcome:
        plan = tier_plan(settings, trace.block_tokens * bytes_per_token)
        costs = Costs(bytes_per_token, prefill, bandwidths)
        return run_tiers(trace, plan, costs, end_hints=end_hints, progress=progress)

    return Choice(config.name, run)


def checked_config(config: Path, unused: Iterable[object]) -> Config:
    """Read a configuration file. Raises `ConfigError`, also if one of the `unused` options is given."""
    if any(option is not None for option in unused):
        raise ConfigError(
            "a configuration has its own capacities and policies", remedy="leave --config or the other options out"
        )
    return load_config(config)


def tier_plan(config: Config, block_bytes: int) -> TierPlan:
    """Count the capacities of a configuration in blocks of `block_bytes` bytes."""

    def memory(name: str, tier: HotConfig | WarmConfig) -> MemoryPlan:
        return MemoryPlan(name, tier.capacity // block_bytes, tier.policy.name, tier.policy.parameters)

    hot = (memory("hot", config.hot),) if config.hot.capacity else ()
    return TierPlan(
        memory=(*hot, memory("warm", config.warm)),
        cold=config.cold.capacity // block_bytes,
        demote_ahead=config.warm.demote_ahead,
    )


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr, if that is a terminal, how many of `total` requests are done."""
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("replay", total=total)
        yield lambda done: bar.update(task, completed=done)


def run_command(path: Path, block_tokens: int, choice: Choice, *, end_hints: bool, as_json: bool) -> None:
    """Replay the trace and print a table, or one line of JSON. Progress goes to stderr if that is a terminal."""
    trace = read_trace(path, block_tokens)
    with progress_bar(len(trace.requests)) as progress:
        outcome = choice.run(trace, end_hints, progress)
    if as_json:
        sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
    else:
        print_outcome(outcome, choice.label, Console())
