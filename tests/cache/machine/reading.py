"""Rules that read: lookups, acquires of every kind, reads without a lease, acquires left half-way."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tierkv.cache import Chain, ReadLease
from tierkv.core.acquiring import Acquired, Terms

from .draws import branches, namespaces, picks, sessions, tenants, ttls
from .model import BLOCK_TOKENS
from .world import HeldCompute, HeldStep, World


class Reading(World):
    """Adds its rules."""

    @rule(tenant=tenants, namespace=namespaces, branch=branches)
    def lookup(self, tenant: str, namespace: int, branch: tuple[int, ...]) -> None:
        chain = self.chain(namespace, branch)
        with self.undisturbed():
            found = self.caches[tenant].lookup(chain)
            assert found.blocks == len(found.tiers) == self.model.hit(tenant, chain)
        assert found.tokens == found.blocks * BLOCK_TOKENS
        assert set(found.tiers) <= {"hot", "warm", "cold"}

    @rule(
        tenant=tenants,
        namespace=namespaces,
        branch=branches,
        wait=st.sampled_from([0.0, 0.02]),
        ttl=ttls,
        compute=st.sampled_from([0.0, 0.0, 40.0, 120.0]),
        prefill=st.sampled_from([None, 1.0, 1e9]),
        session=sessions,
        groups=st.sampled_from([None, None, (0,), (1,)]),
        most=st.sampled_from([None, None, 3]),
        keep=st.booleans(),
    )
    def acquire(
        self,
        tenant: str,
        namespace: int,
        branch: tuple[int, ...],
        wait: float,
        ttl: float,
        compute: float,
        prefill: float | None,
        session: str,
        groups: tuple[int, ...] | None,
        most: int | None,
        keep: bool,
    ) -> None:
        chain = self.chain(namespace, branch)
        if namespace == 0 and groups is not None:
            groups = (0,)
        total = min(len(chain), most or len(chain))
        self.catch_up()
        before = self.model.hit(tenant, Chain(chain.namespace, chain.hashes[:total]), groups)
        ready = self.model.hit(tenant, Chain(chain.namespace, chain.hashes[:total]), groups, self.resident())
        now = self.clock.monotonic()
        found = self.caches[tenant].acquire(
            chain,
            wait_s=wait,
            ttl_s=ttl,
            max_blocks=most,
            compute_s=compute,
            prefill_tokens_per_s=prefill,
            session=session,
            groups=groups,
        )
        read = self.hold(tenant, chain, found, now + ttl, groups, before, total)
        self.catch_up()
        assert found.published_blocks >= self.model.hit(tenant, Chain(chain.namespace, chain.hashes[:total]), groups), (
            "a published prefix was overlooked"
        )
        if self.reads_gate.shut and wait == 0.0:
            assert found.hit_blocks == min(ready, found.published_blocks), "a block in memory was overlooked"
        if session:
            self.session_chains[tenant, chain.namespace, session] = chain
        self.check_compute(tenant, chain, found, groups, total, compute, now)
        if not keep:
            self.let_go(read)

    def check_compute(
        self,
        tenant: str,
        chain: Chain,
        found: ReadLease,
        groups: tuple[int, ...] | None,
        total: int,
        compute: float,
        now: float,
    ) -> None:
        """Who computes what is missing: nobody else, and then this caller if it asked; or whoever has the lease."""
        start = found.published_blocks
        wanted = range(len(self.spec_of(chain).groups)) if groups is None else groups
        covered = {key for lease in self.computing for key in lease.covers}
        if start < total:
            owned = any(self.model.key(tenant, chain, (start, group)) in covered for group in wanted)
            assert found.computed_elsewhere == owned
            assert (found.compute is not None) == (bool(compute) and not owned)
        else:
            assert found.compute is None
            assert not found.computed_elsewhere
        if found.compute is not None:
            assert (found.compute.start, found.compute.stop) == (start, total)
            keys = {self.model.key(tenant, chain, (i, g)) for i in range(start, total) for g in wanted} - covered
            left = keys - self.model.published.keys()
            self.computing.append(HeldCompute(tenant, found.compute, compute, now + compute, keys, left))

    @rule(tenant=st.sampled_from(["red", "blue"]), namespace=namespaces, branch=branches)
    def acquire_all(self, tenant: str, namespace: int, branch: tuple[int, ...]) -> None:
        """With nothing in the way, all that is published and fits the shares of its writers can be had.

        With two sizes of slots not always: what is there of the prefix can lie in every superblock.
        """
        if self.stopped or self.steps:
            return
        chain = self.chain(namespace, branch)
        self.caches[tenant].flush()
        self.catch_up()
        before = self.model.hit(tenant, chain)
        fits = self.fits(tenant, chain, before)
        now = self.clock.monotonic()
        found = self.caches[tenant].acquire(chain, wait_s=10.0, ttl_s=40.0, prefill_tokens_per_s=1.0)
        read = self.hold(tenant, chain, found, now + 40.0, None, before, len(chain))
        in_the_way = self.reads[:-1] or self.writes or self.pins or self.engine._state.quarantine
        if fits and self.setup.sizes == 1 and not in_the_way:
            assert found.hit_blocks == found.published_blocks == before
        self.let_go(read)

    def fits(self, tenant: str, chain: Chain, length: int) -> bool:
        """Say whether a published prefix fits what those who wrote it can count on in the warm tier."""
        used: Counter[str] = Counter()
        for place in self.model.needed(chain.namespace, length):
            block = self.model.published[self.model.key(tenant, chain, place)]
            used[block.writer] += block.nbytes
        order = self.engine.placement.memory[-1].order
        return all(nbytes <= order.allowance(self.tenant(writer).id) for writer, nbytes in used.items())

    @rule(pick=picks, ttl=st.sampled_from([None, None, 40.0, 520.0]))
    def use_read(self, pick: int, ttl: float | None) -> None:
        """Read every block through the handle, or renew it."""
        if not self.reads:
            return
        read = self.reads[pick % len(self.reads)]
        if read.handle is None:
            return
        if ttl is not None:
            read.deadline = self.clock.monotonic() + ttl
            read.handle.renew(ttl)
        for ref, data in read.blocks.items():
            out = memoryview(bytearray(ref.length))
            read.handle.read_into(ref.index, out, ref.group)
            assert out == data
            assert read.handle.view(ref.index, ref.group) == data

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        if not self.reads:
            return
        self.let_go(self.reads[pick % len(self.reads)])

    @rule(tenant=tenants, namespace=namespaces, branch=branches, group=st.integers(0, 1))
    def read_into(self, tenant: str, namespace: int, branch: tuple[int, ...], group: int) -> None:
        """The last block of a chain, without a lease."""
        chain = self.chain(namespace, branch)
        group = group if namespace else 0
        key = self.model.key(tenant, chain, (len(chain) - 1, group))
        out = memoryview(bytearray(self.setup.unit))
        with self.undisturbed():
            found = self.caches[tenant].read_into(chain, len(chain) - 1, out, group=group)
            if found:
                data = self.model.published[key].data
                assert out[: len(data)] == data
            else:
                warm = self.engine.placement.memory[-1].tier
                assert warm.slot(key) is None or self.model.hit(tenant, chain) < len(chain)

    @rule(tenant=tenants, namespace=namespaces, branch=branches, compute=st.sampled_from([0.0, 40.0]))
    def begin_acquire(self, tenant: str, namespace: int, branch: tuple[int, ...], compute: float) -> None:
        chain = self.chain(namespace, branch)
        self.catch_up()
        terms = Terms(frozenset({"hot", "warm"}), 60.0, 520.0, compute_s=compute, prefill_tokens_per_s=1.0)
        step = self.engine.reader.acquire(self.tenant(tenant), chain.namespace, chain.hashes, terms)
        self.drive(HeldStep(tenant, chain, step, None, self.model.hit(tenant, chain)))

    @rule(pick=picks, abandon=st.booleans())
    def go_on(self, pick: int, abandon: bool) -> None:
        if not self.steps:
            return
        held = self.steps.pop(pick % len(self.steps))
        if abandon:
            held.step.close()
        else:
            self.drive(held)

    def drive(self, held: HeldStep) -> None:
        """Run a step to its next pause, or to its end."""
        try:
            next(held.step)
        except StopIteration as end:
            found: Acquired = end.value
            self.catch_up()
            if found.compute is not None:
                self.engine.release(self.tenant(held.tenant), found.compute.id)
            self.hold(held.tenant, held.chain, found, found.deadline, None, len(held.chain), len(held.chain))
        else:
            self.steps.append(held)
