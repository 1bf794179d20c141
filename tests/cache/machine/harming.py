"""Rules that take away: deletions, flipped bits, time, a disk that stops, death."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tierkv.errors import CorruptBlock
from tierkv.storage.tier import Slot, SlotTier

from ..support import wait_until
from . import audit
from .draws import branches, namespaces, picks, tenants
from .model import Block
from .world import HANDED_BACK, World


class Harming(World):
    """Adds its rules."""

    @rule(tenant=tenants, namespace=namespaces, branch=branches, pick=picks, aimed=st.booleans())
    def delete(self, tenant: str, namespace: int, branch: tuple[int, ...], pick: int, aimed: bool) -> None:
        """Delete any block, or one that somebody is reading."""
        chain = self.chain(namespace, branch)
        read = [self.model.published[key] for read in self.reads for key in read.keys.values()]
        if aimed and read:
            tenant, chain = read[pick % len(read)].writer, read[pick % len(read)].chain
        groups = range(len(self.spec_of(chain).groups))
        with self.undisturbed():
            keys = {self.model.key(tenant, chain, (len(chain) - 1, group)) for group in groups}
            keys &= self.model.published.keys()
            assert self.caches[tenant].delete(chain) == len(keys)
            self.remove(keys)
            assert self.caches[tenant].lookup(chain).blocks < len(chain)

    @rule(tenant=tenants, namespace=namespaces)
    def clear(self, tenant: str, namespace: int) -> None:
        name = self.specs[namespace].namespace
        with self.undisturbed():
            keys = {
                key
                for key, block in self.model.published.items()
                if (block.writer, block.chain.namespace) == (tenant, name)
            }
            assert self.caches[tenant].clear(name) == len(keys)
            self.remove(keys)

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["lease", "direct", "demote", "promote"]))
    def damage(self, pick: int, how: str) -> None:
        """A bit flips in memory: whoever touches the block next finds out; what nobody touched is put right again."""
        if self.stopped or self.steps:
            return
        memory = self.engine.placement.memory
        with self.undisturbed():
            leased = {key for read in self.reads for key in read.keys.values()}
            found = [(level, key) for level, m in enumerate(memory) for key, _ in m.tier.records() if key not in leased]
            if not found:
                return
            if how == "demote":  # of blocks that will be written soon
                found = [(level, key) for level, key in found if key in memory[level].dirty] or found
            if how == "promote":
                found = [(level, key) for level, key in found if level and not memory[0].tier.has(key)] or found
            level, key = found[pick % len(found)]
            tier = memory[level].tier
            block, slot = self.model.published[key], tier.slot(key)
            assert slot is not None
            self.flip(tier, slot)
            corrupt = self.engine._state.counters.corrupt_blocks.total()
        chain = block.chain
        cache = self.caches[block.writer]
        if how == "direct":
            out = memoryview(bytearray(self.setup.unit))
            if cache.read_into(chain, len(chain) - 1, out, group=block.group):
                assert out[: block.nbytes] == block.data
        elif how == "promote":
            cache.prefetch(chain).wait(10.0)
        elif how == "demote":
            cache.flush()
        else:
            with cache.acquire(chain, wait_s=0.0, groups=(block.group,)) as read:
                for ref in read.blocks:
                    if (ref.tier, ref.offset) == (tier.name, slot.offset):
                        with pytest.raises(CorruptBlock):
                            read.view(ref.index, ref.group)
        wait_until(lambda: audit.at_rest(self.engine))
        self.mend(level, block, slot, corrupt)

    def flip(self, tier: SlotTier, slot: Slot) -> None:
        """Turn one bit of a slot round."""
        start = bytearray(self.content(tier, slot, 8))
        start[7] ^= 1
        tier.write(slot, start)

    def mend(self, level: int, block: Block, slot: Slot, corrupt: int) -> None:
        """The damaged copy was found and removed, or is there still and nobody was given it."""
        state = self.engine._state
        tier = self.engine.placement.memory[level].tier
        with contextlib.nullcontext() if self.puts_gate.shut else self.engine._demoter._one_at_a_time, state.lock:
            found = state.counters.corrupt_blocks.total() > corrupt
            if not found and tier.slot(block.key) == slot:
                self.flip(tier, slot)
            elif found:  # a good copy from elsewhere may have come to the same place
                for pin in self.pins.values():
                    pin.places.pop((block.key, tier.name), None)
                if block.key not in state.index:
                    self.remove({block.key})

    @rule()
    def flush(self) -> None:
        if self.stopped:
            return
        recycled = self.engine._state.counters.evicted_blocks["cold"]
        self.caches["red"].flush()
        if self.setup.cold:
            assert len(self.dirty()) <= self.engine._state.counters.evicted_blocks["cold"] - recycled

    def dirty(self) -> set[bytes]:
        return {key for memory in self.engine.placement.memory for key in memory.dirty}

    @rule(seconds=st.sampled_from([80.0, 80.0, 640.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.jump(seconds)
        self.expire()

    @rule(reads=st.booleans(), puts=st.booleans())
    def stop_the_disk(self, reads: bool, puts: bool) -> None:
        if not self.setup.cold:
            return
        if reads:
            self.reads_gate.close()
        if puts and not self.puts_gate.shut:
            with self.undisturbed():
                self.puts_gate.close()

    @rule()
    def disk_goes_on(self) -> None:
        if not self.stopped:
            return
        self.open_gates()

    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        """A clean end keeps all there is room for; a kill keeps what the cold tier had."""
        for held in self.steps:
            held.step.close()
        self.open_gates()
        old, survivors = self.engine, set[bytes]()
        counters = old._state.counters
        self.catch_up()
        self.lives += 1
        directory = Path(self.home.name) / f"life-{self.lives}"
        if kill:
            with self.undisturbed():
                cold = old.placement.cold
                survivors = {key for key, _ in cold.records()} if cold is not None else survivors
                shutil.copytree(self.directory / "state", directory / "state")
            self.caches["red"].close()
            shutil.rmtree(self.directory)
            self.directory = directory
        else:
            recycled = counters.evicted_blocks["cold"]
            self.caches["red"].close()
            lost = sum(counters.lost_blocks[reason] for reason in HANDED_BACK) - self.lost
            if self.setup.cold:  # the flush may have pushed out of the cold tier what is in memory
                assert len(self.dirty()) <= counters.evicted_blocks["cold"] - recycled
                lost += len(self.dirty())
        self.open()
        self.model.waiting.clear()
        there = {entry.key for entry in self.engine._state.index}
        assert there <= self.model.published.keys()
        if kill:
            assert there == survivors & self.model.published.keys()
        elif self.setup.cold:
            assert len(self.model.published) - len(there) == lost
        else:
            assert not there
        self.model.published = {key: block for key, block in self.model.published.items() if key in there}
