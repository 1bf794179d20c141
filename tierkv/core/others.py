"""What others do about the blocks a request misses: whether to wait for them, or to compute.

They may be requests of this machine, which hold a compute lease, or other machines, which have a claim in the shared
tier. A caller that hands over (one engine prefills, another goes on) waits for whoever publishes, announced or not.
All methods are called with the engine's lock held.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from tierkv.core.chain import ChainView
from tierkv.core.computing import Computing
from tierkv.core.leases import ComputeRecord
from tierkv.core.sharing.following import Claim
from tierkv.core.state import State
from tierkv.core.steps import Pause
from tierkv.core.tenants import Tenant

__all__ = ["ComputeGrant", "Others"]


@dataclass(frozen=True, slots=True)
class ComputeGrant:
    """A compute lease on blocks ``[start, stop)``; `deadline` of the first progress in monotonic seconds."""

    id: str
    start: int
    stop: int
    deadline: float


class Others:
    """One request's look at what others compute.

    Parameters
    ----------
    compute_s
        Time to live of the compute lease that the caller would take; 0: it wants none, and waits for nobody.
    handoff
        The caller never computes: it waits for what others publish.
    deadline
        How long it waits at most (monotonic seconds).

    Attributes
    ----------
    grant
        The caller's own compute lease.
    elsewhere
        Somebody else computes the first block that is missing.
    since
        The first block that somebody else was waited for, if anybody was.
    """

    def __init__(
        self,
        state: State,
        computing: Computing,
        tenant: Tenant,
        *,
        compute_s: float,
        handoff: bool,
        deadline: float,
    ) -> None:
        self._state = state
        self._computing = computing
        self._tenant = tenant
        self._compute_s = compute_s
        self._handoff = handoff
        self._deadline = deadline
        self._announced_by: float | None = None
        self._neighbour: tuple[ComputeRecord, Future[None]] | None = None
        self._expected: tuple[bytes, Future[None]] | None = None
        self._announced: Future[Claim | None] | None = None
        self.grant: ComputeGrant | None = None
        self.elsewhere = False
        self.since: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether `leave` has something to do."""
        return self._neighbour is not None or self._expected is not None

    def look(self, chain: ChainView, published: int, total: int, now: float, *, complete: bool) -> Pause | None:
        """Say what to wait for before going on with `published` of a chain's `total` blocks.

        None: nothing, see `grant`.

        `complete`: all that is published can be used. Otherwise what follows would be of no use.
        """
        self.grant, self.elsewhere = None, False
        if published >= total:
            return None
        owner = self._computing.at(chain, published)
        self.elsewhere = owner is not None
        waits = complete and now < self._deadline
        if self._handoff:
            return self._expect(chain, published, total, 0.0) if waits else None
        if not self._compute_s:
            return None
        if owner is not None:
            return self._join(chain, owner, published, total) if waits else None
        claim: Claim | None = None
        if self._asks_around(now):
            if self._announced is None:
                # Blocks may have come meanwhile: the answer to that comes with the answer to this.
                self.since = published if self.since is None else self.since
                assert self._state.sharing is not None
                self._announced = self._state.sharing.claim(chain, published, total, self._compute_s)
            if not self._announced.done():
                return Pause([self._announced], self._announced_by or now)
        if self._announced is not None and self._announced.done():
            claim, self._announced = self._announced.result(), None
            if claim is None:
                self.elsewhere = True
                return self._expect(chain, published, total, self._compute_s) if waits else None
        lease = self._computing.grant(self._tenant, chain, published, total, self._compute_s, claim)
        self.grant = ComputeGrant(lease.id, lease.start, lease.stop, lease.deadline)
        return None

    def leave(self) -> None:
        """Wait for nobody any more."""
        if self._neighbour is not None:
            self._computing.forget(*self._neighbour)
            self._neighbour = None
        if self._expected is not None:
            self._computing.expect_no_more(*self._expected)
            if self._state.sharing is not None:
                self._state.sharing.forget(self._expected[1])
            self._expected = None

    def _asks_around(self, now: float) -> bool:
        sharing = self._state.sharing
        if sharing is None or not sharing.single_flight:
            return False
        if self._announced_by is None:
            self._announced_by = min(self._deadline, now + sharing.probe_s)
        return now < self._announced_by

    def _join(self, chain: ChainView, owner: ComputeRecord, published: int, total: int) -> Pause:
        self.since = published if self.since is None else self.since
        self._neighbour = (owner, self._computing.wait(owner, chain, published, total))
        return Pause([self._neighbour[1]], self._deadline)

    def _expect(self, chain: ChainView, published: int, total: int, claim_s: float) -> Pause:
        """Wait for the next block from wherever it comes."""
        self.since = published if self.since is None else self.since
        done: Future[None] = Future()
        # Of several groups the last one's block: the others are published with it, or it is waited for again.
        key = chain.key(published, chain.groups[-1])
        self._computing.expect(key, done)
        if self._state.sharing is not None:
            self._state.sharing.follow(chain, published, total, claim_s, done)
        self._expected = (key, done)
        # A look once more after the announcement's time: the claim may be free by then.
        self._announced_by = self._deadline
        return Pause([done], self._deadline)
