"""Rules that write, and that compute."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tierkv.cache import Written
from tierkv.errors import ChecksumMismatch
from tierkv.storage.tier import checksum

from .draws import branches, namespaces, picks, sessions, tenants, ttls
from .world import World


class Writing(World):
    """Adds its rules."""

    @rule(
        tenant=tenants,
        namespace=namespaces,
        branch=branches,
        start=st.sampled_from([0, 0, 0, 1, 3]),
        wait=st.sampled_from([0.0, 0.02]),
        session=sessions,
    )
    def store(
        self, tenant: str, namespace: int, branch: tuple[int, ...], start: int, wait: float, session: str
    ) -> None:
        chain = self.chain(namespace, branch)
        write = self.reserve(tenant, chain, min(start, len(chain)), wait, 520.0, session)
        self.commit(write, {index for index, _ in write.open})
        self.end_write(write)

    @rule(branch=branches)
    def store_patiently(self, branch: tuple[int, ...]) -> None:
        """With nothing in the way, all finds room in time, and what makes room is written to the disk before."""
        if self.stopped or self.steps or self.reads or self.writes or self.pins or self.engine._state.quarantine:
            return
        chain = self.chain(0, branch)
        hurried = self.engine._state.counters.lost_blocks["not_demoted_in_time"]
        write = self.reserve("red", chain, 0, 10.0, 520.0, "")
        assert {grant.state for grant in write.handle.grants} <= {"granted", "present"}
        self.commit(write, {index for index, _ in write.open})
        self.end_write(write)
        assert self.engine._state.counters.lost_blocks["not_demoted_in_time"] == hurried

    @rule(
        tenant=tenants,
        namespace=namespaces,
        branch=branches,
        start=st.sampled_from([0, 0, 0, 1, 3]),
        wait=st.sampled_from([0.0, 0.02]),
        ttl=ttls,
        session=sessions,
    )
    def reserve_and_keep(
        self, tenant: str, namespace: int, branch: tuple[int, ...], start: int, wait: float, ttl: float, session: str
    ) -> None:
        chain = self.chain(namespace, branch)
        self.reserve(tenant, chain, min(start, len(chain)), wait, ttl, session)

    @rule(pick=picks, order=st.permutations(range(6)), share=st.integers(1, 6))
    def commit_some(self, pick: int, order: list[int], share: int) -> None:
        if not self.writes:
            return
        write = self.writes[pick % len(self.writes)]
        for index in order[:share]:
            if any(place[0] == index for place in write.open) and not write.closed:
                self.commit(write, {index})

    @rule(pick=picks)
    def commit_what_was_not_written(self, pick: int) -> None:
        """A writer that announces other bytes than it wrote loses the block, and publishes nothing."""
        if not any(write.open for write in self.writes):
            return
        writes = [write for write in self.writes if write.open]
        write = writes[pick % len(writes)]
        index, group = max(write.open)
        block = self.model.block(write.tenant, write.chain, (index, group))
        write.handle.buffer(index, group)[:] = block.data
        with pytest.raises(ChecksumMismatch):
            self.engine.writer.commit(
                self.tenant(write.tenant),
                write.handle.id,
                [Written(index, group, block.nbytes, checksum(block.data) ^ 1)],
            )
        write.open.remove((index, group))
        # The handle does not know: its owner would end it now.
        self.end_write(write)

    @rule(pick=picks, ttl=st.sampled_from([None, None, None, 520.0]))
    def end_or_renew_write(self, pick: int, ttl: float | None) -> None:
        if not self.writes:
            return
        write = self.writes[pick % len(self.writes)]
        if ttl is None or write.closed:
            self.end_write(write)
        else:
            write.deadline = self.clock.monotonic() + ttl
            write.handle.renew(ttl)

    @rule(pick=picks, ttl=st.sampled_from([None, None, 40.0, 520.0]))
    def end_or_renew_compute(self, pick: int, ttl: float | None) -> None:
        if not self.computing:
            return
        lease = self.computing[pick % len(self.computing)]
        if ttl is None:
            lease.handle.release()
            lease.handle.release()
            self.computing.remove(lease)
        else:
            lease.ttl_s, lease.deadline = ttl, self.clock.monotonic() + ttl
            lease.handle.renew(ttl)
