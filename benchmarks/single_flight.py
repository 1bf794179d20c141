"""Many engine processes get the same cold prompt at the same moment: how often it is prefilled, and for how long.

    python benchmarks/single_flight.py

Sixteen processes share one daemon and a prompt of 2,000 tokens. An engine that computes takes 10 ms for a block of 64
tokens, on an accelerator of its own, and publishes each block at once. Per row

    alone    every engine computes what it does not find when it begins, as without a cache that coordinates
    shared   engines ask with `compute_s`: one computes, the others wait for its blocks
    killed   the same, and the computing process is killed (SIGKILL) when it is half-way

`prefills` counts computed blocks, in prompts: 1.00 is the least there is, 16.00 the most. `first` and `last` are the
seconds until the first and the last engine has the whole prompt. An engine without progress for a second is taken for
dead. `stored` says how much of the prompt is published in the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from threading import Event

import numpy as np

import tierkv
from tierkv.cache import Cache

PROCESSES = 16
PROMPT_TOKENS = 2000
BLOCK_S = 0.01
PROGRESS_S = 1.0
BOUND_S = 60.0
GROUPS = (tierkv.KVGroup(tuple(range(8)), "full", 2, 64),)


@dataclass(frozen=True)
class Outcome:
    """One row: computed blocks in prompts, seconds until the first and the last engine was served, engines served,
    and the part of the prompt that is published."""

    prefills: float
    first_s: float
    last_s: float
    served: int
    stored: float


class Fleet:
    """Engine processes with one prompt."""

    def __init__(self, url: str, number: int, *, shared: bool) -> None:
        self._fork = multiprocessing.get_context("fork")
        self._url = url
        self._shared = shared
        self._spec = tierkv.KVSpec("bench", str(number), "bfloat16", 64, GROUPS)
        self._chain = tierkv.Chain.of(self._spec, np.arange(PROMPT_TOKENS))
        self._payload = os.urandom(self._spec.layout().nbytes)
        self._go = self._fork.Barrier(PROCESSES + 1)
        self._computed = self._fork.Array("i", PROCESSES, lock=False)
        self._served = self._fork.Array("d", PROCESSES, lock=False)

    def run(self, *, kill: bool) -> Outcome:
        processes = [self._fork.Process(target=self._engine, args=(n,)) for n in range(PROCESSES)]
        for process in processes:
            process.start()
        self._go.wait(BOUND_S)
        began = time.monotonic()
        if kill:
            self._kill_half_way(processes)
        for process in processes:
            process.join(BOUND_S)
            process.kill()
        served = [at - began for at in self._served if at]
        with tierkv.connect(self._url) as cache:
            stored = cache.lookup(self._chain).blocks
        blocks = len(self._chain)
        return Outcome(sum(self._computed) / blocks, min(served), max(served), len(served), stored / blocks)

    def _kill_half_way(self, processes: list[ForkProcess]) -> None:
        pause = Event()
        while max(self._computed) < len(self._chain) // 2:
            pause.wait(0.001)
        pid = processes[int(np.argmax(self._computed))].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def _engine(self, number: int) -> None:
        with tierkv.connect(self._url, timeout_s=BOUND_S) as cache:
            cache.register(self._spec)
            self._go.wait(BOUND_S)
            self._serve(cache, number)
            self._served[number] = time.monotonic()

    def _serve(self, cache: Cache, number: int) -> None:
        """Use what is there and compute the rest, block by block."""
        chain, accelerator = self._chain, Event()
        compute_s = PROGRESS_S if self._shared else 0.0
        with cache.acquire(chain, wait_s=BOUND_S, compute_s=compute_s) as read:
            start = read.hit_blocks
            if start == len(chain):
                return
            with cache.reserve(chain, start=start) as write:
                granted = {grant.index for grant in write.granted}
                for index in range(start, len(chain)):
                    accelerator.wait(BLOCK_S)
                    self._computed[number] += 1
                    if index in granted:
                        write.write(index, self._payload)
                        write.commit([index])


@contextmanager
def daemon() -> Iterator[str]:
    """Run a daemon; give its address."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        socket, config = Path(home) / "s", Path(home) / "config.yaml"  # JSON is YAML
        config.write_text(json.dumps({"socket": str(socket), "warm": {"capacity": "256MiB"}}))
        command = [sys.executable, "-m", "tierkv.service", "serve", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                next(line for line in process.stdout if "ready" in line)
                yield f"unix://{socket}"
            finally:
                process.send_signal(signal.SIGTERM)


def main() -> None:
    blocks = PROMPT_TOKENS // 64
    print(
        f"{PROCESSES} processes, {PROMPT_TOKENS} tokens, {blocks} blocks of 256 KiB, {BLOCK_S * 1e3:.0f} ms each:",
        end=" ",
    )
    print(f"one prefill {blocks * BLOCK_S:.2f} s; dead after {PROGRESS_S:.1f} s; {os.cpu_count()} cores,", end=" ")
    print(f"Python {platform.python_version()}")
    print(f"{'':8} {'prefills':>8} {'first s':>8} {'last s':>8} {'served':>7} {'stored':>7}")
    with daemon() as url:
        for number, (name, shared, kill) in enumerate(
            [("alone", False, False), ("shared", True, False), ("killed", True, True)]
        ):
            found = Fleet(url, number, shared=shared).run(kill=kill)
            print(f"{name:8} {found.prefills:8.2f} {found.first_s:8.2f} {found.last_s:8.2f}", end=" ")
            print(f"{found.served:7} {found.stored:7.2f}")


if __name__ == "__main__":
    main()
