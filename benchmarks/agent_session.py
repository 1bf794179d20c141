"""An agent's session with and without tierkv: every turn's prompt is the one before, its answer, and a little more.

    python benchmarks/agent_session.py                              about eight minutes on one core
    python benchmarks/agent_session.py --json run.json              every turn as JSON as well
    python benchmarks/agent_session.py --plot docs/pictures/agent-session.svg --from run.json

SmolLM2-135M-Instruct in float32 answers 30 turns over Python source, of whose prompt tokens some 96 % stood in the turn
before. Both sides answer each turn, one after the other, by the same loop with the same chunks; neither keeps anything
in the engine from one request to the next, so that what is reused comes from tierkv. Half-way its daemon is restarted,
and the next turn is loaded from disk. Counted is the time to the first token (TTFT), everything included; the answers
must be the same, token by token. A side's prompt tokens per second are all its prompt tokens by all its TTFT.

The model runs on one thread (`--threads`): the daemon and whatever else the machine does have the others. Two things
are set for both sides. TRANSFORMERS_SDPA_FORCE_GQA: without it transformers copies K and V of the whole prefix for
every chunk, once for each query head, and a short prefill behind a long prefix takes 1.7 times as long on a CPU. And
malloc keeps what is freed.

The picture needs matplotlib (`pip install 'tierkv-cache[plot]'`), which draws axes, scales and SVG better than a script
would.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import inspect
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from tierkv.cache import Cache
from tierkv.engines.transformers import Generation, generate
from tierkv.errors import DependencyMissing
from tierkv.service.demo.daemon import Daemon
from tierkv.service.demo.model import LoadedModel, find_checkpoint, load_model

TURNS = 30
SYSTEM_TOKENS = 2560
TURN_TOKENS = 30
ANSWER_TOKENS = 20
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
TIERS: dict[str, dict[str, Any]] = {"warm": {"capacity": "512MiB"}, "cold": {"capacity": "1GiB", "codec": "bx1"}}
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # malloc.h
MODULES = ("textwrap", "heapq", "fnmatch", "string", "shlex", "statistics", "difflib")


@dataclass(frozen=True)
class Turn:
    """One turn. Times in seconds; `repeated` are the prompt's tokens that stood in the turn before, `tiers` the reused
    tokens by the tier that held them."""

    prompt_tokens: int
    repeated: int
    reused: int
    tiers: dict[str, int]
    plain_s: float
    cached_s: float
    wait_s: float
    load_s: float
    same: bool
    errors: list[str]


def source_tokens(tokenizer: Any) -> Iterator[int]:
    """Yield the tokens of some of the interpreter's own modules."""
    for name in MODULES:
        yield from tokenizer.encode(inspect.getsource(importlib.import_module(name)), add_special_tokens=False)


def session(loaded: LoadedModel, daemon: Daemon, turns: int) -> Iterator[Turn]:
    """Play the session; restart the daemon half-way. An engine keeps its connection as long as there is a daemon."""
    source = source_tokens(loaded.tokenizer)
    known: list[int] = []
    prompt = [next(source) for _ in range(SYSTEM_TOKENS)]
    for count in (turns // 2, turns - turns // 2):
        daemon.start()
        with daemon.connect("agent") as cache:
            cache.register(loaded.spec)
            for _ in range(count):
                prompt = [*prompt, *(next(source) for _ in range(TURN_TOKENS))]
                plain, cached = answer(loaded, None, prompt), answer(loaded, cache, prompt)
                yield compared(len(prompt), len(known), plain, cached)
                prompt = known = [*prompt, *plain.tokens]
        daemon.stop()


def answer(loaded: LoadedModel, cache: Cache | None, prompt: list[int]) -> Generation:
    return generate(
        loaded.model,
        cache,
        loaded.spec,
        prompt,
        ANSWER_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        compute_s=30.0,
        session="agent",
    )


def compared(prompt_tokens: int, repeated: int, plain: Generation, cached: Generation) -> Turn:
    return Turn(
        prompt_tokens=prompt_tokens,
        repeated=repeated,
        reused=cached.reused_tokens,
        tiers=dict(cached.tokens_by_tier),
        plain_s=plain.ttft_s,
        cached_s=cached.ttft_s,
        wait_s=cached.wait_s,
        load_s=cached.load_s,
        same=plain.tokens == cached.tokens,
        errors=list(cached.errors),
    )


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{os.cpu_count()} cores, {torch.get_num_threads()} for the model, {versions}"


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Totals of a session; rates in prompt tokens per second of TTFT."""
    prompts = sum(turn.prompt_tokens for turn in turns)
    prefilled = sum(turn.prompt_tokens - turn.reused for turn in turns)
    plain_s, cached_s = sum(turn.plain_s for turn in turns), sum(turn.cached_s for turn in turns)
    return {
        "prompt_tokens": prompts,
        "prefilled_tokens": prefilled,
        "repeated_share": sum(turn.repeated for turn in turns) / prompts,
        "fewer_prefilled": prompts / prefilled,
        "plain_tokens_per_s": prompts / plain_s,
        "cached_tokens_per_s": prompts / cached_s,
        "speedup": plain_s / cached_s,
        "median_ttft_ratio": median(turn.plain_s / turn.cached_s for turn in turns[1:]),
        "copy_share": sum(turn.load_s for turn in turns) / cached_s,
    }


def show(turn: Turn, number: int) -> None:
    tiers = ", ".join(f"{tokens:,} {tier}" for tier, tokens in turn.tiers.items()) or "nothing"
    note = "" if turn.same and not turn.errors else f"  {'OTHER ANSWER ' * (not turn.same)}{' '.join(turn.errors)}"
    print(
        f"{number + 1:4} {turn.prompt_tokens:7,} {turn.prompt_tokens - turn.reused:9,} {turn.plain_s:9.2f} "
        f"{turn.cached_s:9.3f} {turn.plain_s / turn.cached_s:6.1f}  {tiers}{note}",
        flush=True,
    )


def show_summary(turns: Sequence[Turn]) -> None:
    found = summary(turns)
    print(
        f"\n{found['repeated_share']:.1%} of {found['prompt_tokens']:,} prompt tokens had been in the turn before; "
        f"{found['prefilled_tokens']:,} were prefilled, {found['fewer_prefilled']:.1f} times fewer."
    )
    print(
        f"Prompt tokens per second of TTFT: {found['plain_tokens_per_s']:,.0f} without tierkv, "
        f"{found['cached_tokens_per_s']:,.0f} with it, {found['speedup']:.1f} times more."
    )
    print(f"Copying KV into the model's cache object took {found['copy_share']:.0%} of the TTFT with tierkv.")
    print("All answers are the same." if all(turn.same for turn in turns) else "ANSWERS DIFFER.")


def draw(turns: Sequence[Turn], path: Path) -> None:
    """Draw the TTFT of every turn as SVG. Raises `DependencyMissing`."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise DependencyMissing("the picture needs matplotlib", remedy="pip install 'tierkv-cache[plot]'") from None
    mpl.use("svg")
    # Text stays text: smaller, and it can be found and read aloud. A fixed salt and no date give the same file again.
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "tierkv", "font.family": "sans-serif", "font.size": 10}
    )
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    numbers = range(1, len(turns) + 1)
    axes.plot(numbers, [turn.plain_s for turn in turns], color="#9a9a9a", lw=2, label="without tierkv")
    axes.plot(numbers, [turn.cached_s for turn in turns], color="#0b6e99", lw=2, label="with tierkv")
    restarted = next((number for number, turn in enumerate(turns) if "cold" in turn.tiers), None)
    if restarted is not None:
        after = turns[restarted].cached_s
        axes.annotate(
            "daemon restarted:\nloaded from disk",
            (restarted + 1, after),
            (restarted + 1, after * 2.6),
            ha="center",
            color="#444444",
            arrowprops={"arrowstyle": "-", "color": "#444444"},
        )
    axes.set(xlabel="turn", ylabel="seconds to first token", yscale="log", xlim=(1, len(turns)))
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_locator=NullLocator())
    axes.grid(axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    found = summary(turns)
    axes.set_title(
        f"SmolLM2-135M, float32, {turns[0].prompt_tokens:,} to {turns[-1].prompt_tokens:,} prompt tokens, "
        f"{found['repeated_share']:.1%} of them repeated:\n{found['speedup']:.1f} times the prompt tokens per second",
        loc="left",
        fontsize=10,
    )
    figure.savefig(path, metadata={"Date": None})


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, as engines that serve do.

    What the system hands out anew must be touched first, which on a virtual machine can take ten times as long as the
    copy that follows.
    """
    malloc = ctypes.CDLL(None)
    malloc.mallopt(M_MMAP_MAX, 0)
    malloc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def play(threads: int, turns: int) -> list[Turn]:
    keep_freed_memory()
    os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"
    loaded = load_model(find_checkpoint())
    torch.set_num_threads(threads)
    loaded = replace(loaded, spec=replace(loaded.spec, block_tokens=BLOCK_TOKENS))
    print(f"{machine()}\n{turns} turns; TTFT in seconds, with tierkv {BLOCK_TOKENS} tokens a block")
    print(f"{'turn':>4} {'prompt':>7} {'prefilled':>9} {'without':>9} {'with':>9} {'ratio':>6}  reused from")
    played = []
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        daemon = Daemon(Path(home), TIERS)
        try:
            for turn in session(loaded, daemon, turns):
                show(turn, len(played))
                played.append(turn)
        finally:
            daemon.stop()
    show_summary(played)
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn and the totals")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw TTFT by turn as SVG")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="FILE", help="draw an earlier run's JSON, run nothing"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the model (default: 1)")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    if options.source:
        turns = [Turn(**turn) for turn in json.loads(options.source.read_text())["turns"]]
    else:
        turns = play(options.threads, options.turns)
    if options.json:
        data = {
            "machine": machine(),
            "at": time.strftime("%Y-%m-%d"),
            "summary": summary(turns),
            "turns": [asdict(turn) for turn in turns],
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.plot:
        draw(turns, options.plot)
    return 0 if all(turn.same for turn in turns) else 1


if __name__ == "__main__":
    sys.exit(main())
