"""Rules that hint at what comes: prefetches, pins, sessions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tierkv.cache import Chain
from tierkv.errors import LimitExceeded

from .draws import branches, namespaces, picks, tenants, ttls
from .world import HeldPin, World


class Hinting(World):
    """Adds its rules."""

    @rule(tenant=tenants, namespace=namespaces, branch=branches, deadline=ttls)
    def prefetch(self, tenant: str, namespace: int, branch: tuple[int, ...], deadline: float) -> None:
        ticket = self.caches[tenant].prefetch(self.chain(namespace, branch), deadline_s=deadline)
        self.tickets.append((self.clock.monotonic() + deadline + 300.0, ticket))

    @rule(pick=picks, cancel=st.booleans())
    def use_ticket(self, pick: int, cancel: bool) -> None:
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)][1]
        if cancel:
            ticket.cancel()
            self.tickets.pop(pick % len(self.tickets))
        progress = ticket.wait(0.02 if self.stopped else 10.0)
        assert progress.blocks_done <= progress.blocks_total
        if not self.stopped:
            assert progress.state != "loading"
            assert progress.blocks_done == progress.blocks_total

    def pin_name(self, tenant: str, chain: Chain) -> tuple[object, ...]:
        return tenant, chain.namespace, chain.hashes[-1]

    def pinned(self, name: tuple[object, ...], tenant: str, chain: Chain, length: int, ttl: float) -> None:
        keys = {self.model.key(tenant, chain, place) for place in self.model.needed(chain.namespace, length)}
        assert keys <= self.model.published.keys()
        self.pins.pop(name, None)
        if keys:
            self.pins[name] = HeldPin(tenant, self.clock.monotonic() + ttl, len(keys), keys)

    @rule(tenant=tenants, namespace=namespaces, branch=branches, ttl=ttls)
    def pin(self, tenant: str, namespace: int, branch: tuple[int, ...], ttl: float) -> None:
        chain = self.chain(namespace, branch)
        with self.undisturbed():
            try:
                found = self.caches[tenant].pin(chain, ttl)
            except LimitExceeded:
                self.pins.pop(self.pin_name(tenant, chain), None)
                return
            assert found.blocks <= self.model.hit(tenant, chain)
            self.pinned(self.pin_name(tenant, chain), tenant, chain, found.blocks, ttl)
        spec = self.specs[namespace]
        needed = self.model.needed(chain.namespace, found.blocks)
        assert found.nbytes == sum(spec.layout(group).nbytes for _, group in needed)

    @rule(tenant=tenants, namespace=namespaces, branch=branches, pick=picks)
    def unpin(self, tenant: str, namespace: int, branch: tuple[int, ...], pick: int) -> None:
        chain = self.chain(namespace, branch)
        pin = self.pins.pop(self.pin_name(tenant, chain), None)
        assert self.caches[tenant].unpin(chain) == (pin.count if pin else 0)

    @rule(tenant=tenants, namespace=namespaces, session=st.sampled_from(["a", "b"]))
    def end_session(self, tenant: str, namespace: int, session: str) -> None:
        name = (tenant, self.specs[namespace].namespace, session)
        chain = self.session_chains.pop(name, None)
        retired = self.caches[tenant].end_session(name[1], session)
        if chain is None:
            assert retired == 0
        else:
            assert retired <= len(chain) * len(self.specs[namespace].groups)
        self.pins.pop(("session", *name), None)

    @rule(
        tenant=tenants,
        namespace=namespaces,
        session=st.sampled_from(["a", "b"]),
        expected=st.sampled_from([40.0 / 1.5, 125.0]),
    )
    def pause_session(self, tenant: str, namespace: int, session: str, expected: float) -> None:
        name = (tenant, self.specs[namespace].namespace, session)
        chain = self.session_chains.get(name)
        with self.undisturbed():
            held = self.caches[tenant].pause_session(name[1], session, expected)
            if chain is None or expected > 60.0:
                assert held == 0
            else:
                self.pinned(("session", *name), tenant, chain, held, 1.5 * expected)
