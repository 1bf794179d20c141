"""Random lives of three machines that share blocks: nothing wrong, nothing stale, nothing left behind.

Every block carries the time it was written, counted in clears and deletions of the whole world. Whatever a machine
serves must be a block as it was written, and not from before a clear or a deletion that the machine made itself, or
could have learned of: after `settle` all have.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.cache import Chain

from ..support import head, make_chain, make_spec, wait_until
from .world import Machine, World, store_of

CHAINS, BLOCKS = 3, 5
NAMES = ("a", "b", "c")
machines = st.sampled_from(NAMES)
chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, BLOCKS)


def written(chain: Chain, index: int, at: int, nbytes: int) -> bytes:
    seed = int.from_bytes(chain.hashes[index][:8], "little") ^ at
    return struct.pack("<Q", at) + np.random.default_rng(seed).bytes(nbytes - 8)


class Machines(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tierkv-machines-"))
        self.patch = pytest.MonkeyPatch()
        self.world = World()
        self.spec = make_spec()
        self.chains = [make_chain(self.spec, BLOCKS, seed) for seed in range(CHAINS)]
        self.running = {name: self.start(name) for name in NAMES}
        self.now = 0
        self.floor = dict.fromkeys(NAMES, 0)
        self.pending_floor = 0
        self.gone: dict[str, dict[bytes, int]] = {name: {} for name in NAMES}
        self.pending_gone: dict[bytes, int] = {}

    def start(self, name: str) -> Machine:
        shared = {"sync": "1h", "transfer_timeout": "10s"}  # what fails does so at once: nothing is ever late
        machine = Machine(self.world, self.home, name, {"shared": shared, "warm": self.warm()}, self.patch)
        machine.cache.register(self.spec)
        return machine

    def warm(self) -> dict[str, str]:
        return {"capacity": "2MiB", "directory": str(self.home)}

    @rule(name=machines, chain=chains, length=lengths)
    def store(self, name: str, chain: int, length: int) -> None:
        prompt = head(self.chains[chain], length)
        with self.running[name].cache.reserve(prompt, wait_s=5.0) as lease:
            for grant in lease.granted:
                lease.buffer(grant.index)[:] = written(prompt, grant.index, self.now, grant.length)
            lease.commit()

    @rule(name=machines, chain=chains, wait_s=st.sampled_from([0.0, 2.0]), compute_s=st.sampled_from([0.0, 0.05]))
    def acquire(self, name: str, chain: int, wait_s: float, compute_s: float) -> None:
        prompt = self.chains[chain]
        with self.running[name].cache.acquire(prompt, wait_s=wait_s, compute_s=compute_s) as read:
            for ref in read.blocks:
                data = bytes(read.view(ref.index))
                (at,) = struct.unpack_from("<Q", data)
                assert data == written(prompt, ref.index, at, len(data)), "a block that nobody wrote"
                least = max(self.floor[name], self.gone[name].get(prompt.hashes[ref.index], 0))
                assert at >= least, f"{name} serves a block of {at}, from before {least}"
            assert sum(read.tokens_by_tier.values()) == read.hit_tokens
            if read.compute is not None:
                read.compute.release()

    @rule(name=machines, chain=chains)
    def prefetch(self, name: str, chain: int) -> None:
        self.running[name].cache.prefetch(self.chains[chain]).wait(2.0)

    @rule(name=machines)
    def flush(self, name: str) -> None:
        self.running[name].cache.flush()

    @rule(name=machines)
    def clear(self, name: str) -> None:
        self.now += 1
        self.running[name].cache.clear(self.spec.namespace)
        self.floor[name] = self.pending_floor = self.now

    @rule(name=machines, chain=chains, length=lengths)
    def delete(self, name: str, chain: int, length: int) -> None:
        prompt = head(self.chains[chain], length)
        self.now += 1
        self.running[name].cache.delete(prompt)
        self.gone[name][prompt.hashes[-1]] = self.pending_gone[prompt.hashes[-1]] = self.now

    @rule(name=machines)
    def look_around(self, name: str) -> None:
        """One machine learns what others have done, as it does every few seconds."""
        sharing = self.running[name].engine._state.sharing
        assert sharing is not None
        sharing._sync()

    @rule()
    def settle(self) -> None:
        """All is well again, and every machine has looked around."""
        self.world.down = self.world.full = False
        for machine in self.running.values():
            wait_until(lambda machine=machine: self.healthy(machine))
        for _ in range(2):  # those who come first have to learn from those who come last, too
            for name in NAMES:
                self.look_around(name)
        for name in NAMES:
            self.floor[name] = max(self.floor[name], self.pending_floor)
            for key, at in self.pending_gone.items():
                self.gone[name][key] = max(at, self.gone[name].get(key, 0))

    @rule(down=st.booleans())
    def fail(self, down: bool) -> None:
        self.world.down = down

    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        self.world.full = full

    # What there is depends on threads: what is chosen must not, or the same life could not be lived again.
    @rule(which=st.integers(0, 1 << 16))
    def lose(self, which: int) -> None:
        """The engine evicts something: a block, or what the machines agree on."""
        names = sorted(self.world.values)
        if names:
            self.world.values.pop(names[which % len(names)], None)

    @rule(which=st.integers(0, 1 << 16), at=st.integers(0, 1 << 20))
    def damage(self, which: int, at: int) -> None:
        names = sorted(self.world.blocks())
        if names:
            name = names[which % len(names)]
            value = bytearray(self.world.values[name])
            value[at % len(value)] ^= 0x10
            self.world.values[name] = bytes(value)

    @rule(name=machines)
    def restart(self, name: str) -> None:
        self.running[name].close()
        self.running[name] = self.start(name)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        for machine in self.running.values():
            state = machine.engine._state
            with state.lock:
                counts = state.leases.counts()
            assert counts["read"] == counts["write"] == counts["compute"] == 0

    def healthy(self, machine: Machine) -> bool:
        try:
            store_of(machine).check()
        except Exception:
            return False
        return store_of(machine).available

    def teardown(self) -> None:
        self.world.down, self.world.stuck = False, set()
        for machine in self.running.values():
            machine.close()
        self.patch.undo()
        shutil.rmtree(self.home)


TestMachines = Machines.TestCase
TestMachines.settings = settings(
    max_examples=400 if os.environ.get("TIERKV_LONG") else 15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
