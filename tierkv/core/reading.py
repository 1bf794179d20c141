"""Reading: lookup and acquire."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from tierkv.cache import BlockRef, Hit
from tierkv.core.acquiring import Acquired, Acquisition, Terms
from tierkv.core.chain import ChainView
from tierkv.core.computing import Computing
from tierkv.core.leases import ReadRecord
from tierkv.core.loads import Loader
from tierkv.core.observing import Observer
from tierkv.core.state import State
from tierkv.core.steps import Pause, Step
from tierkv.core.tenants import Tenant
from tierkv.errors import InvalidRequest

__all__ = ["Reader"]

log = logging.getLogger(__name__)


class Reader:
    """Finds and pins published blocks."""

    def __init__(self, state: State, loader: Loader, computing: Computing) -> None:
        self._state = state
        self._loader = loader
        self._computing = computing

    def lookup(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], *, ask: bool = True) -> Hit:
        """See `tierkv.cache.Cache.lookup`. `ask`: have the shared tier asked for the next who wants to know."""
        state = self._state
        with state.lock:
            chain = ChainView(state, tenant, namespace, hashes)
            length = chain.hit(len(hashes))
            if ask and state.sharing is not None and length < len(hashes):
                state.sharing.ask(chain, length, len(hashes))
            slowest = [0] * length
            for (index, _), levels in chain.published(length):
                fastest = (levels & -levels).bit_length() - 1
                if fastest > slowest[index]:
                    slowest[index] = fastest
            names = state.placement.names
        return Hit(length, length * chain.spec.block_tokens, tuple([names[level] for level in slowest]))

    def find(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], wait_s: float) -> Step[Hit]:
        """As `lookup`, but wait `wait_s` seconds at most for what the shared tier has."""
        state = self._state
        hit = self.lookup(tenant, namespace, hashes, ask=not wait_s)
        probe: Future[bool] | None = None
        if state.sharing is not None and wait_s and hit.blocks < len(hashes):
            with state.lock:
                probe = state.sharing.ask(ChainView(state, tenant, namespace, hashes), hit.blocks, len(hashes))
        if probe is not None and state.sharing is not None:
            yield Pause([probe], time.monotonic() + min(wait_s, state.sharing.probe_s))
            hit = self.lookup(tenant, namespace, hashes, ask=False)
        return hit

    def acquire(self, tenant: Tenant, namespace: str, hashes: Sequence[bytes], terms: Terms) -> Step[Acquired]:
        """See `tierkv.cache.Cache.acquire`."""
        lock = self._state.lock
        request = Acquisition(self._state, self._loader, self._computing, tenant, terms)
        try:
            with lock:
                pause = request.begin(namespace, hashes)
            while pause is not None:
                yield pause
                with lock:
                    pause = request.look()
            if self._state.observers:
                _tell(self._state.observers, request)
            return request.result()
        finally:
            if request.holding:
                with lock:
                    request.let_go()

    def refs(self, tenant: Tenant, lease_id: str) -> tuple[BlockRef, ...]:
        """Return the blocks a live read lease pins. Raises `LeaseLost`."""
        with self._state.lock:
            lease = self._state.leases.find(lease_id, tenant.id)
            if not isinstance(lease, ReadRecord):
                raise InvalidRequest(
                    "this lease is not for reading", remedy="read blocks under the lease of an acquire"
                )
            return lease.refs


def _tell(observers: Sequence[Observer], request: Acquisition) -> None:
    seen = request.seen()
    for observer in observers:
        try:
            observer.acquired(seen)
        except Exception:
            log.exception("an observer of requests failed")
