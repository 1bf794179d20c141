"""Single flight among real processes: one of sixteen prefills, also when the one that does is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from threading import Event

import numpy as np
import pytest

import tierkv
from tests.service.daemon import running
from tierkv.cache import Chain
from tierkv.spec import KVGroup, KVSpec

from .support import assert_intact, make_spec, payload, wait_until

PROMPT_TOKENS = 2000
PROCESSES = 16
PROGRESS_S = 0.5
BOUND_S = 30.0


class Engines:
    """Processes that all get the same prompt at the same moment and take some milliseconds to compute a block.

    Attributes
    ----------
    prefilled
        Blocks each has computed so far.
    """

    def __init__(self, url: str, spec: KVSpec) -> None:
        fork = multiprocessing.get_context("fork")
        self._url, self._spec = url, spec
        self._chain = Chain.of(spec, np.arange(PROMPT_TOKENS))
        self._go = fork.Barrier(PROCESSES + 1)
        self.prefilled = fork.Array("i", PROCESSES, lock=False)
        self.processes: list[BaseProcess] = [fork.Process(target=self._serve, args=(n,)) for n in range(PROCESSES)]

    @property
    def blocks(self) -> int:
        return len(self._chain)

    def start(self) -> None:
        for process in self.processes:
            process.start()
        self._go.wait(BOUND_S)

    def exit_codes(self) -> list[int | None]:
        """Wait for all of them; None for those that hang."""
        for process in self.processes:
            process.join(BOUND_S)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def _serve(self, number: int) -> None:
        spec, chain, nap = self._spec, self._chain, Event()
        with tierkv.connect(self._url, timeout_s=BOUND_S) as cache:
            cache.register(spec)
            self._go.wait(BOUND_S)
            with cache.acquire(chain, wait_s=BOUND_S, compute_s=PROGRESS_S) as read:
                start = read.hit_blocks
                with cache.reserve(chain, start=start) as lease:
                    granted = {grant.index for grant in lease.granted}
                    for index in range(start, len(chain)):
                        nap.wait(0.003)
                        self.prefilled[number] += 1
                        if index in granted:
                            lease.write(index, payload(spec, chain, index))
                            lease.commit([index])
            with cache.acquire(chain, wait_s=0.0) as read:
                assert read.hit_blocks == len(chain)
                assert_intact(read, spec, chain)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running({"warm": {"capacity": "16MiB"}}) as daemon:
        yield daemon.url


def test_sixteen_processes_prefill_one_prompt_once(url: str) -> None:
    engines = Engines(url, make_spec(KVGroup((0,), "full", 1, 16), block_tokens=64))
    engines.start()
    assert engines.exit_codes() == [0] * PROCESSES
    assert sorted(engines.prefilled) == [0] * (PROCESSES - 1) + [engines.blocks]


def test_a_killed_process_costs_less_than_half_a_prompt(url: str) -> None:
    engines = Engines(url, make_spec(KVGroup((0,), "full", 1, 16), block_tokens=64))
    engines.start()
    wait_until(lambda: max(engines.prefilled) >= engines.blocks // 2)
    victim = int(np.argmax(engines.prefilled))
    pid = engines.processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    codes = engines.exit_codes()
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [0] * (PROCESSES - 1)
    assert engines.blocks <= sum(engines.prefilled) <= 1.5 * engines.blocks
    assert sum(prefilled > 0 for prefilled in engines.prefilled) == 2
