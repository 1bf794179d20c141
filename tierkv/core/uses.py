"""Uses that readers report afterwards, because they read without asking."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierkv.core.state import State
from tierkv.core.tenants import Tenant

__all__ = ["Uses"]


class Uses:
    """Feeds reported uses to policies and counters."""

    def __init__(self, state: State) -> None:
        self._state = state

    def report(self, tenant: Tenant, namespace: str, group: int, hashes: Sequence[bytes]) -> None:
        """Note that blocks of the warm tier were read, in this order. Raises `NotFound` for an unknown namespace.

        The tokens of group 0 count as asked for and hit; the other groups hold the same tokens.
        """
        state = self._state
        with state.lock:
            info = state.namespace(namespace)
            state.placement.memory[-1].order.seen(tenant.id)
            keys = [tenant.block_key(chain_hash, group) for chain_hash in hashes]
            for key in reversed(keys):  # a chain is read head first, and its tail should go first
                entry = state.index.awake(key)
                if entry is not None:
                    entry.uses += 1
                    entry.used = time.monotonic()
                    state.placement.touch(entry, again=True)
            state.placement.touch_cold(keys[::-1])
            state.breakpoints.hit(state.leases, tenant.id, namespace, hashes, time.monotonic())
            if group == 0:
                tokens = len(hashes) * info.spec.block_tokens
                tier = state.placement.memory[-1].tier.name
                state.ledger.read(tenant, info.fingerprint, tokens, tier)
