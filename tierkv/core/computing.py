"""Single flight: of several requests with the same cold prompt, one computes and the others wait for its blocks.

A compute lease covers the missing blocks of a chain. It lives from progress to progress: every block published under it
moves its deadline, so a dead or stalled holder loses it after one `ttl_s`, and whoever wakes first takes over. A lost
lease stops nobody: its holder may still publish, and those who wait leave at their own deadline.
All access happens under the engine's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tierkv.core.chain import ChainView
from tierkv.core.leases import ComputeRecord, LeaseTable
from tierkv.core.state import State
from tierkv.core.tenants import Tenant

if TYPE_CHECKING:
    from tierkv.core.sharing.following import Claim

__all__ = ["Computing"]

BURST = 0.5
"""Progress within so much of the time that the progress before it took belongs to it."""


class Computing:
    """Hands out compute leases and wakes those who wait for what they cover."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._computing: dict[bytes, ComputeRecord] = {}
        self._expected: dict[bytes, list[Future[None]]] = {}

    def at(self, chain: ChainView, index: int) -> ComputeRecord | None:
        """Return the lease under which somebody computes a block of a chain."""
        found = (self._computing.get(chain.key(index, group)) for group in chain.groups)
        return next((lease for lease in found if lease is not None), None)

    def grant(
        self, tenant: Tenant, chain: ChainView, start: int, stop: int, ttl_s: float, claim: Claim | None = None
    ) -> ComputeRecord:
        """Grant the lease on blocks ``[start, stop)``; what of them somebody else computes stays theirs.

        It ends the claim that tells other machines.
        """
        now = time.monotonic()
        lease = ComputeRecord(
            LeaseTable.new_id(), tenant.id, now + ttl_s, ttl_s, chain.info.name, start, stop, {}, {}, now, now
        )
        for index in range(start, stop):
            for group in chain.groups:
                key = chain.key(index, group)
                if self._computing.setdefault(key, lease) is lease:
                    lease.keys[key] = index
                    if key not in self._state.index:
                        lease.left[index] = lease.left.get(index, 0) + 1
        lease.claim = claim
        self._state.leases.add(lease)
        self._state.counters.compute_leases["granted"] += 1
        return lease

    def wait(self, lease: ComputeRecord, chain: ChainView, start: int, stop: int) -> Future[None]:
        """Return a future that is done when all blocks the chain and the lease have in common from `start` are
        published, or when the lease has ended."""
        last = start
        while last + 1 < stop and self.at(chain, last + 1) is lease:
            last += 1
        done: Future[None] = Future()
        lease.waiting.append((last, done))
        return done

    def forget(self, lease: ComputeRecord, done: Future[None]) -> None:
        """Forget somebody who does not wait any more."""
        lease.waiting = [item for item in lease.waiting if item[1] is not done]

    def expect(self, key: bytes, done: Future[None]) -> None:
        """Complete `done` when a block is published, by whomever."""
        self._expected.setdefault(key, []).append(done)

    def expect_no_more(self, key: bytes, done: Future[None]) -> None:
        """Forget somebody who does not expect a block any more."""
        rest = [other for other in self._expected.pop(key, ()) if other is not done]
        if rest:
            self._expected[key] = rest

    def published(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were published: progress of the leases that cover them, and what others expect."""
        moved: dict[str, tuple[ComputeRecord, int]] = {}
        for key in keys:
            for done in self._expected.pop(key, ()) if self._expected else ():
                if not done.done():
                    done.set_result(None)
            lease = self._computing.get(key)
            if lease is None:
                continue
            index = lease.keys[key]
            left = lease.left.get(index)
            if left is None:
                continue
            _, blocks = moved.get(lease.id, (lease, 0))
            if left > 1:
                lease.left[index] = left - 1
            else:
                del lease.left[index]
                blocks += 1
            moved[lease.id] = (lease, blocks)
        now = time.monotonic()
        for lease, blocks in moved.values():
            self._progress(lease, blocks, now)

    def end(self, lease: ComputeRecord, outcome: str) -> None:
        """End a lease, for whatever reason, and wake everybody who waits for it."""
        self._learn(lease)
        self._state.leases.remove(lease)
        for key in lease.keys:
            if self._computing.get(key) is lease:
                del self._computing[key]
        self._state.counters.compute_leases[outcome] += 1
        if lease.claim is not None and self._state.sharing is not None:
            self._state.sharing.ended(lease.claim)
        waiting, lease.waiting = lease.waiting, []
        for _, done in waiting:
            done.set_result(None)

    def _learn(self, lease: ComputeRecord) -> None:
        """Take what was published since the last pause for a sample of how fast the engine computes.

        Engines compute many blocks at once and then publish them one by one: the time to compute them is before the
        first of them, and what passes between them says nothing.
        """
        state = self._state
        info = state.namespaces.get(lease.namespace)
        if info is not None:
            tokens = lease.burst_blocks * info.spec.block_tokens
            state.prefill_rates.learn(lease.namespace, tokens, lease.progressed - lease.burst_since)
        lease.burst_blocks, lease.burst_since = 0, lease.progressed

    def __len__(self) -> int:
        """Blocks that are covered by leases."""
        return len(self._computing)

    def _progress(self, lease: ComputeRecord, blocks: int, now: float) -> None:
        state = self._state
        if now - lease.progressed > BURST * (lease.progressed - lease.burst_since):
            self._learn(lease)
        lease.burst_blocks += blocks
        lease.progressed = now
        if not lease.left:
            self.end(lease, "done")
            return
        state.leases.renew(lease, now + lease.ttl_s)
        if lease.claim is not None and state.sharing is not None:
            following = min(lease.left)
            key = next(key for key, index in lease.keys.items() if index == following)
            state.sharing.progressed(lease.claim, key)
        ready = [done for last, done in lease.waiting if last not in lease.left]
        if ready:
            lease.waiting = [(last, done) for last, done in lease.waiting if last in lease.left]
            for done in ready:
                done.set_result(None)
