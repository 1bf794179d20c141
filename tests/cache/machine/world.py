"""The cache under test, everything somebody holds of it, and the comparison with the model after every step."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis.stateful import RuleBasedStateMachine, invariant

import tierkv
from tests.storage.fake_cuda import FakeDevice
from tierkv.cache import BlockRef, Chain, ComputeLease, ReadLease, Ticket, WriteLease
from tierkv.core.acquiring import Acquired
from tierkv.core.engine import Engine
from tierkv.core.steps import Step
from tierkv.core.tenants import Tenant
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LeaseLost
from tierkv.spec import KVSpec
from tierkv.storage.superblocks import slot_bytes
from tierkv.storage.tier import Slot, SlotTier

from ..support import wait_until
from . import audit
from .model import BLOCK_TOKENS, Block, Clock, Gate, Model, Place, Setup

HANDED_BACK = ("evicted", "not_demoted_in_time")
"""Reasons for which policy alone unpublishes a block."""


@dataclass(slots=True, eq=False)
class HeldRead:
    """A read lease, with what it showed when it was given."""

    tenant: str
    id: str
    deadline: float
    blocks: dict[BlockRef, bytes]
    keys: dict[BlockRef, bytes]
    handle: ReadLease | None = None
    damaged: set[BlockRef] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class HeldWrite:
    """A write lease: what may still be written under it, and what waits for a predecessor."""

    tenant: str
    chain: Chain
    handle: WriteLease
    deadline: float
    open: set[Place]
    waiting: set[bytes] = field(default_factory=set)
    closed: bool = False


@dataclass(slots=True, eq=False)
class HeldCompute:
    """A compute lease: the blocks it covers, and those of them that are missing still."""

    tenant: str
    handle: ComputeLease
    ttl_s: float
    deadline: float
    covers: set[bytes]
    left: set[bytes]


@dataclass(slots=True, eq=False)
class HeldPin:
    """A pin: how many blocks it holds, and where those of them lie that have been seen in memory."""

    tenant: str
    deadline: float
    count: int
    keys: set[bytes]
    places: dict[tuple[bytes, str], Slot] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class HeldStep:
    """An operation somebody stopped driving half-way."""

    tenant: str
    chain: Chain
    step: Step[Any]
    groups: tuple[int, ...] | None
    published: int


class World(RuleBasedStateMachine):
    """One cache, all that is held of it, and the model: what the rules stand on."""

    setup: Setup
    specs: tuple[KVSpec, ...]
    model: Model
    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.home = tempfile.TemporaryDirectory(prefix="tierkv-machine-")
        self.lives = 0
        self.opened = False

    def open(self) -> None:
        self.device = FakeDevice()
        with (
            mock.patch("tierkv.storage.hot.open_device", return_value=self.device),
            mock.patch("tierkv.core.build.device_sums", return_value=None),
        ):
            cache = tierkv.open(self.setup.settings(self.directory), tenant="red", on_device=True)
        assert isinstance(cache, EmbeddedCache)
        self.caches = {"red": cache, "blue": cache.for_tenant("blue"), "green": cache.for_tenant("green")}
        for each in self.caches.values():
            for spec in self.specs:
                each.register(spec)
        self.engine: Engine = cache.engine
        self.engine.writer._quarantine_s = 120.0
        self.engine._loader._room_wait_s = 0.1
        cold = self.engine.placement.cold
        self.reads_gate, self.puts_gate = Gate(cold, "read_into"), Gate(cold, "put_many")
        self.reads: list[HeldRead] = []
        self.writes: list[HeldWrite] = []
        self.computing: list[HeldCompute] = []
        self.pins: dict[tuple[object, ...], HeldPin] = {}
        self.tickets: list[tuple[float, Ticket]] = []
        self.steps: list[HeldStep] = []
        self.session_chains: dict[tuple[str, str, str], Chain] = {}
        self.lost = 0

    def teardown(self) -> None:
        try:
            if self.opened:
                self.end_everything()
        finally:
            if self.opened:
                self.open_gates()
                self.caches["red"].close()
                assert self.device.faults == []
                assert self.device.allocated == self.device.pinned == {}
            self.clock.restore()
            self.home.cleanup()

    def chain(self, namespace: int, branch: tuple[int, ...]) -> Chain:
        """A chain whose blocks are shared with every branch that begins alike."""
        return Chain.of(self.specs[namespace], [token for turn in branch for token in [turn] * BLOCK_TOKENS])

    def tenant(self, name: str) -> Tenant:
        return self.engine.tenant(name)

    @property
    def stopped(self) -> bool:
        return self.reads_gate.shut or self.puts_gate.shut

    def open_gates(self) -> None:
        self.reads_gate.open()
        self.puts_gate.open()

    def spec_of(self, chain: Chain) -> KVSpec:
        return self.model.specs[chain.namespace]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No demotion changes what is published meanwhile; the model is in line with what policy has evicted so far."""
        with contextlib.nullcontext() if self.puts_gate.shut else self.engine._demoter._one_at_a_time:
            self.reconcile()
            yield

    def catch_up(self) -> None:
        """Bring the model in line with what policy has evicted so far."""
        with self.undisturbed():
            pass

    def reconcile(self) -> None:
        """Compare what is published with the model: nothing unknown, nothing gone but what policy says it evicted."""
        state = self.engine._state
        with state.lock:
            there = {entry.key: entry.meta for entry in state.index}
            lost = sum(state.counters.lost_blocks[reason] for reason in HANDED_BACK)
        published = self.model.published
        assert there.keys() <= published.keys(), "a block is published that nobody published, or that was removed"
        for key, meta in there.items():
            assert meta.tenant == self.tenant(published[key].writer).id
        gone = published.keys() - there.keys()
        assert len(gone) == lost - self.lost, "blocks are gone and nobody says why"
        self.lost = lost
        for read in self.reads:
            assert not gone & set(read.keys.values()), "a leased block was evicted"
        for pin in self.pins.values():
            assert not gone & {key for key, _ in pin.places}, "a pinned block was evicted from memory"
        evicted = {key: published.pop(key) for key in gone}
        if not self.setup.cold and not self.setup.hot and self.setup.policy == "lru":
            self.check_tails(evicted)

    def check_tails(self, gone: dict[bytes, Block]) -> None:
        """Where eviction unpublishes, a chain of one tenant loses its tail before its head."""
        for block in self.model.published.values():
            head = gone.get(block.parent)
            assert head is None or block.windowed or head.writer != block.writer, (
                "a chain lost its head before its tail"
            )

    def remove(self, keys: set[bytes]) -> None:
        """Blocks were unpublished, other than by eviction."""
        for key in keys:
            del self.model.published[key]
        for pin in self.pins.values():
            pin.keys -= keys
            pin.places = {place: slot for place, slot in pin.places.items() if place[0] not in keys}
        for read in self.reads:
            read.keys = {ref: key for ref, key in read.keys.items() if key not in keys}

    def progress(self, keys: list[bytes]) -> None:
        """Blocks were published: compute leases that cover them go on, or are done."""
        for write in self.writes:
            write.waiting.difference_update(keys)
        self.writes = [write for write in self.writes if not write.closed or write.waiting]
        for lease in self.computing:
            if lease.left & set(keys):
                lease.left.difference_update(keys)
                lease.deadline = self.clock.monotonic() + lease.ttl_s
        self.computing = [lease for lease in self.computing if lease.left]

    def resident(self) -> set[bytes]:
        return {key for memory in self.engine.placement.memory for key, _ in memory.tier.records()}

    def tier(self, ref: BlockRef) -> SlotTier:
        return next(memory.tier for memory in self.engine.placement.memory if memory.tier.name == ref.tier)

    def bytes_at(self, ref: BlockRef) -> bytes:
        return self.content(self.tier(ref), Slot(ref.offset, ref.length), ref.length)

    @staticmethod
    def content(tier: SlotTier, slot: Slot, nbytes: int) -> bytes:
        out = memoryview(bytearray(nbytes))
        tier.read(slot, out)
        return bytes(out)

    def hold(
        self,
        tenant: str,
        chain: Chain,
        found: ReadLease | Acquired,
        deadline: float,
        groups: tuple[int, ...] | None,
        before: int,
        total: int,
    ) -> HeldRead:
        """Check what an acquire answered. `before`: what was published when it was asked."""
        places = list(self.model.needed(chain.namespace, found.hit_blocks, groups))
        assert [(ref.index, ref.group) for ref in found.blocks] == places
        assert found.hit_blocks <= found.published_blocks <= min(before, total)
        assert found.hit_tokens == found.hit_blocks * BLOCK_TOKENS == sum(found.tokens_by_tier.values())
        assert bool(found.id) == bool(places)
        keys = {ref: self.model.key(tenant, chain, (ref.index, ref.group)) for ref in found.blocks}
        blocks = {}
        for ref, key in keys.items():
            assert key in self.model.published, "a hit on a block that is not published"
            blocks[ref] = self.model.published[key].data
            assert self.bytes_at(ref) == blocks[ref], "a hit shows another block's bytes"
        handle = found if isinstance(found, ReadLease) else None
        read = HeldRead(tenant, found.id, deadline, blocks, keys, handle)
        if found.id:
            self.reads.append(read)
        return read

    def let_go(self, read: HeldRead) -> None:
        if read in self.reads:
            self.reads.remove(read)
        if read.handle is not None:
            read.handle.release()
            read.handle.release()
        elif read.id:
            with contextlib.suppress(LeaseLost):
                self.engine.release(self.tenant(read.tenant), read.id)

    def reserve(self, tenant: str, chain: Chain, start: int, wait: float, ttl: float, session: str) -> HeldWrite:
        self.catch_up()
        busy = {key for write in self.writes for key in write.waiting} | {
            self.model.key(write.tenant, write.chain, place) for write in self.writes for place in write.open
        }
        before = set(self.model.published)
        lease = self.caches[tenant].reserve(chain, start=start, wait_s=wait, ttl_s=ttl, session=session)
        now = self.clock.monotonic()
        self.catch_up()
        if session:
            self.session_chains[tenant, chain.namespace, session] = chain
        groups = range(len(self.spec_of(chain).groups))
        assert [(g.index, g.group) for g in lease.grants] == [(i, g) for i in range(start, len(chain)) for g in groups]
        for grant in lease.grants:
            key = self.model.key(tenant, chain, (grant.index, grant.group))
            if grant.state == "present":
                assert key in before, "a block was called present that is not published"
            elif grant.state == "busy":
                assert key in busy or self.steps
            elif grant.state == "granted":
                assert key not in busy, "a block was given to two writers"
                assert key not in self.model.published, "a published block may be overwritten"
        write = HeldWrite(tenant, chain, lease, now + ttl, {(g.index, g.group) for g in lease.granted})
        assert bool(lease.id) == bool(write.open)
        if lease.id:
            self.writes.append(write)
        return write

    def commit(self, write: HeldWrite, indices: set[int]) -> None:
        places = {place for place in write.open if place[0] in indices}
        blocks = [self.model.block(write.tenant, write.chain, place) for place in sorted(places)]
        for (index, group), block in zip(sorted(places), blocks, strict=True):
            if (index + group) % 2:
                write.handle.buffer(index, group)[:] = block.data
            else:
                write.handle.write(index, block.data, group)
        with self.undisturbed():
            assert write.handle.commit(indices) == len(places)
            write.open -= places
            write.waiting |= {block.key for block in blocks}
            self.progress(self.model.commit(blocks))

    def end_write(self, write: HeldWrite) -> None:
        write.handle.abort()
        write.handle.abort()
        write.open, write.closed = set(), True
        if not write.waiting and write in self.writes:
            self.writes.remove(write)

    def expire(self) -> None:
        """Let the engine and the model drop whatever is past its deadline."""
        now = self.clock.monotonic()
        with self.engine._state.lock:
            self.engine._expire(now)
            self.engine._wakeup.notify()
        self.reads = [read for read in self.reads if read.deadline > now]
        # Whoever takes over must be able to store: reservations of what nobody computes any more are over.
        over = {key for lease in self.computing if lease.deadline <= now for key in lease.covers}
        self.computing = [lease for lease in self.computing if lease.deadline > now]
        self.pins = {name: pin for name, pin in self.pins.items() if pin.deadline > now}
        self.tickets = [(until, ticket) for until, ticket in self.tickets if until > now]
        ended = [write for write in self.writes if write.deadline <= now or over & self.keys_to_write(write)]
        for write in ended:
            for key in write.waiting:
                del self.model.waiting[key]
        self.writes = [write for write in self.writes if write not in ended]

    def keys_to_write(self, write: HeldWrite) -> set[bytes]:
        return {self.model.key(write.tenant, write.chain, place) for place in write.open}

    def end_everything(self) -> None:
        """When every lease, pin, ticket and step has ended, nothing is held and every slot is free or published."""
        self.open_gates()
        for held in self.steps:
            held.step.close()
        self.steps = []

        def over() -> bool:  # what ends may begin something else: a paused session comes back, a slot is quarantined
            self.clock.jump(800.0)
            self.expire()
            return audit.at_rest(self.engine) and not self.held()

        wait_until(over)
        self.books_agree()
        assert not self.model.waiting
        self.everything_cold_is_right()

    def held(self) -> list[str]:
        """What the engine remembers of leases, pins, tickets and writes that have not ended."""
        state, engine = self.engine._state, self.engine
        with engine._demoter._one_at_a_time, state.lock:
            tables = {
                "leases": state.leases._live,
                "writes": state.writing,
                "waiting": state.waiting,
                "quarantine": state.quarantine,
                "computing": engine._computing,
                "tickets": engine.prefetcher._tickets,
                "pins": engine.hints._pins,
                "counts": any(state.leases.counts().values()),
            }
        return [name for name, table in tables.items() if table]

    def everything_cold_is_right(self) -> None:
        cold = self.engine.placement.cold
        if cold is None:
            return
        out = memoryview(bytearray(self.setup.unit))
        with self.undisturbed():
            for key, _ in list(cold.records()):
                meta = cold.read_into(key, out)
                assert out[: meta.length] == self.model.published[key].data

    @invariant()
    def books_agree(self) -> None:
        if not self.opened:
            return
        if not self.reads_gate.shut:
            wait_until(lambda: audit.at_rest(self.engine))
        self.caretaker_rests()
        engine, state = self.engine, self.engine._state
        with self.undisturbed(), state.lock:
            exactly = not self.stopped and not self.steps and audit.at_rest(engine)
            audit.check_places(engine)
            audit.check_leases(engine)
            audit.check_holds(engine, self.clock.monotonic() - 20.0, exactly=exactly)
            audit.check_room(engine, exactly=exactly)
            audit.check_counters(engine)
            if not self.puts_gate.shut:
                audit.check_cold(engine)
            assert state.leases.counts() == {
                "read": len(self.reads),
                "write": len(self.writes),
                "compute": len(self.computing),
                "pin": len(self.pins),
            }
            self.check_bytes()

    def caretaker_rests(self) -> None:
        """Demotion comes to an end: what it moves makes no new work."""
        state, demoter = self.engine._state, self.engine._demoter
        begun = sum(state.counters.demoted_blocks.values())
        polls = 0

        def at_rest() -> bool:
            nonlocal polls
            polls += 1
            with state.lock:
                assert sum(state.counters.demoted_blocks.values()) < begun + 1000, "blocks are demoted without end"
                return polls > 4 or self.puts_gate.shut or not demoter.waiting()  # what is leased may have to stay

        wait_until(at_rest)

    def check_bytes(self) -> None:
        """What is leased or pinned lies where it lay, and every block in memory has its own bytes."""
        for read in self.reads:
            for ref, data in read.blocks.items():
                assert self.bytes_at(ref) == data, "the bytes of a leased block changed"
                self.tier(ref).neighbours(Slot(ref.offset, slot_bytes(ref.length)), ref.length)  # raises if it is free
        for memory in self.engine.placement.memory:
            tier = memory.tier
            for key, _ in tier.records():
                slot, data = tier.slot(key), self.model.published[key].data
                assert slot is not None
                assert self.content(tier, slot, len(data)) == data, "a block in memory has the wrong bytes"
            for pin in self.pins.values():
                for key in pin.keys:
                    found = tier.slot(key)
                    known = pin.places.get((key, tier.name))
                    assert known is None or found == known, "a pinned block was moved"
                    if found is not None:
                        pin.places[key, tier.name] = found
