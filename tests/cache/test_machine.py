"""The embedded cache against a simple model: any sequence of operations, and at the end nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import tierkv
from tierkv.cache import Chain, ReadLease, Ticket, WriteLease
from tierkv.core.engine import Engine
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVGroup, KVSpec

from .support import wait_until

LONG = bool(os.environ.get("TIERKV_LONG"))
TENANTS = ("red", "blue")
# Sixteen blocks fill the warm tier. Two groups of one size share superblocks.
SPEC = KVSpec(
    "machine", "w", "float32", 128, (KVGroup((0,), "full", 1, 64), KVGroup((1,), "sliding_window", 1, 64, 256))
)
BLOCK = SPEC.layout().nbytes


def make_chain(branch: tuple[int, ...]) -> Chain:
    """A chain whose blocks are shared with every branch that begins alike."""
    return Chain.of(SPEC, [token for turn in branch for token in [turn] * SPEC.block_tokens])


def content(tenant: str, chain: Chain, index: int, group: int, version: int) -> bytes:
    mark = b"".join((tenant.encode(), chain.hashes[index], bytes([group]), version.to_bytes(4, "little")))
    return (mark * (BLOCK // len(mark) + 1))[:BLOCK]


chains = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
tenants = st.sampled_from(TENANTS)
Held = tuple[str, Chain, ReadLease, dict[tuple[int, int], bytes]]
Place = tuple[str, bytes, int]  # tenant, chain hash, group


class CacheMachine(RuleBasedStateMachine):
    """`written` is the model: what was last stored under each name. A block may be gone, but never be anything else."""

    reads = Bundle("reads")
    writes = Bundle("writes")
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="tierkv-machine-")
        self.written: dict[Place, bytes] = {}
        self.held: list[Held] = []
        self.writing: list[WriteLease] = []
        self.version = 0
        self.lossless = True
        self.open()

    @property
    def engine(self) -> Engine:
        return self.caches["red"].engine

    def open(self) -> None:
        config: dict[str, Any] = {
            "state_dir": str(Path(self.directory.name) / "state"),
            "warm": {"capacity": "1MiB", "directory": self.directory.name},
            "cold": {"capacity": "6MiB", "codec": "raw"},
        }
        cache = tierkv.open(config, tenant="red")
        assert isinstance(cache, EmbeddedCache)
        self.caches = {"red": cache, "blue": cache.for_tenant("blue")}
        for each in self.caches.values():
            each.register(SPEC)
        self.engine.writer._quarantine_s = 0.01  # else a late writer's slots are gone for the whole run
        self.engine._loader._room_wait_s = 0.05

    def teardown(self) -> None:
        self.check_ending()
        self.caches["red"].close()
        self.directory.cleanup()

    def check_read(self, tenant: str, chain: Chain, read: ReadLease) -> dict[tuple[int, int], bytes]:
        seen = {(ref.index, ref.group): bytes(read.view(ref.index, ref.group)) for ref in read.blocks}
        for (index, group), data in seen.items():
            assert data == self.written[tenant, chain.hashes[index], group]
        assert {index for index, group in seen if group == 0} == set(range(read.hit_blocks))
        assert {index for index, group in seen if group == 1} == set(
            range(max(0, read.hit_blocks - 2), read.hit_blocks)
        )
        assert sum(read.tokens_by_tier.values()) == read.hit_tokens == read.hit_blocks * SPEC.block_tokens
        assert read.hit_blocks <= read.published_blocks <= len(chain)
        return seen

    def fill(self, tenant: str, chain: Chain, lease: WriteLease, indices: set[int]) -> None:
        self.version += 1
        for grant in lease.granted:
            if grant.index in indices:
                data = content(tenant, chain, grant.index, grant.group, self.version)
                lease.buffer(grant.index, grant.group)[:] = data
                self.written[tenant, chain.hashes[grant.index], grant.group] = data
        lease.commit(indices)

    @rule(tenant=tenants, branch=chains, wait=st.sampled_from([0.0, 0.05]))
    def store(self, tenant: str, branch: tuple[int, ...], wait: float) -> None:
        chain = make_chain(branch)
        with self.caches[tenant].reserve(chain, wait_s=wait) as lease:
            self.fill(tenant, chain, lease, {grant.index for grant in lease.granted})

    @rule(
        target=writes,
        tenant=tenants,
        branch=chains,
        wait=st.sampled_from([0.0, 0.05]),
        order=st.permutations(range(7)),
        share=st.integers(0, 7),
    )
    def store_partly(
        self, tenant: str, branch: tuple[int, ...], wait: float, order: list[int], share: int
    ) -> WriteLease:
        """Commit some of the blocks, in any order, and keep the lease."""
        chain = make_chain(branch)
        lease = self.caches[tenant].reserve(chain, wait_s=wait)
        granted = {grant.index for grant in lease.granted}
        for index in order[:share]:
            if index in granted:
                self.fill(tenant, chain, lease, {index})
        self.writing.append(lease)
        return lease

    @rule(lease=consumes(writes), early=st.booleans())
    def end_write(self, lease: WriteLease, early: bool) -> None:
        if lease in self.writing:
            self.writing.remove(lease)
        if early and lease.id and lease.id in self.engine._state.leases._live:
            lease.renew(0.0)  # left to the deadline
        else:
            lease.abort()
            lease.abort()

    @rule(target=reads, tenant=tenants, branch=chains, wait=st.sampled_from([0.0, 5.0]), keep=st.booleans())
    def acquire(self, tenant: str, branch: tuple[int, ...], wait: float, keep: bool) -> Any:
        chain = make_chain(branch)
        read = self.caches[tenant].acquire(chain, wait_s=wait)
        seen = self.check_read(tenant, chain, read)
        if keep:
            held = (tenant, chain, read, seen)
            self.held.append(held)
            return held
        read.release()
        return multiple()

    @rule(held=consumes(reads), expire=st.booleans())
    def end_read(self, held: Held, expire: bool) -> None:
        read = held[2]
        if held in self.held:
            self.held.remove(held)
            if expire:
                read.renew(0.0)
        read.release()
        read.release()

    @rule(target=tickets, tenant=tenants, branch=chains)
    def prefetch(self, tenant: str, branch: tuple[int, ...]) -> Ticket:
        return self.caches[tenant].prefetch(make_chain(branch))

    @rule(ticket=consumes(tickets))
    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()

    @rule(tenant=tenants, branch=chains)
    def delete(self, tenant: str, branch: tuple[int, ...]) -> None:
        chain = make_chain(branch)
        self.caches[tenant].delete(chain)
        assert self.caches[tenant].lookup(chain).blocks < len(chain)

    @rule(tenant=tenants)
    def clear(self, tenant: str) -> None:
        self.caches[tenant].clear(SPEC.namespace)
        for branch in ((0,), (1,), (2,)):
            assert self.caches[tenant].lookup(make_chain(branch)).blocks == 0

    @rule()
    def flush(self) -> None:
        self.caches["red"].flush()
        assert self.engine.stats()["dirty_bytes"] == {"warm": 0}

    @rule()
    def restart(self) -> None:
        state = self.engine._state
        self.caches["red"].close()
        self.lossless &= not state.counters.lost_blocks
        published = {entry.key for entry in state.index}
        self.held, self.writing = [], []
        self.open()
        assert {entry.key for entry in self.engine._state.index} == published

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for _, _, read, seen in self.held:
            for (index, group), data in seen.items():
                assert bytes(read.view(index, group)) == data

    @invariant()
    def published_prefixes_are_closed(self) -> None:
        """As long as nothing was removed, the predecessor of a published block is published."""
        state = self.engine._state
        with state.lock:
            self.lossless &= not state.counters.lost_blocks
            for entry in state.index if self.lossless else ():
                assert entry.meta.group == 1 or not entry.meta.depth or entry.meta.parent in state.index

    @invariant()
    def tables_agree(self) -> None:
        state = self.engine._state
        with state.lock:
            for level, memory in enumerate(state.placement.memory):
                resident = {key for key, _ in memory.tier.records()}
                known = {e.key for e in state.index if e.levels >> level & 1}
                assert resident == known
                assert set(memory.policy.victims()) == known
                dirty = {e.key for e in state.index if e.levels == 1 << level}
                assert set(memory.dirty) == dirty
                assert memory.dirty_bytes == len(dirty) * BLOCK
            assert all(e.levels for e in state.index)
            assert not any(key in state.index for key in state.writing)

    def slots_in_use(self) -> int:
        """Slots that some part of the engine accounts for."""
        state = self.engine._state
        leased = {entry for lease in state.leases._live.values() for entry in getattr(lease, "entries", ())}
        withdrawn = sum(len(entry.withdrawn) for entry in leased)
        resident = sum(1 for _ in self.engine.placement.memory[0].tier.records())
        return resident + withdrawn + len(state.writing) + len(state.quarantine)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        tier = self.engine.placement.memory[0].tier

        def adds_up() -> bool:
            with self.engine._state.lock:
                return bool(tier.allocator.usage().slots == self.slots_in_use())  # type: ignore[attr-defined]

        wait_until(adds_up)  # a load or demotion in flight holds a slot for a moment

    def check_ending(self) -> None:
        """When every lease has ended nothing is pinned, open, waiting or busy."""
        for _, _, read, _ in self.held:
            read.release()
        for lease in self.writing:
            lease.abort()
        state = self.engine._state

        def at_rest() -> bool:
            with state.lock:
                for lease in list(state.leases._live.values()):
                    state.leases.renew(lease, 0.0)
                self.engine._expire(1.0)
                return not self.engine._loader._running and not any(e.pins for e in state.index)

        wait_until(at_rest)
        with state.lock:
            assert state.leases.counts() == {"read": 0, "write": 0, "compute": 0, "pin": 0}
            assert not state.writing
            assert not state.waiting
            assert not any(e.withdrawn for e in state.index)
            assert not state.index.purging
        self.tables_agree()
        self.every_slot_is_accounted_for()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=400 if LONG else 100,
    stateful_step_count=60 if LONG else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
