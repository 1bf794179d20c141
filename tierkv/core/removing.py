"""Deletions and clears: on this machine, and on those that share its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.core.demotion import purge
from tierkv.core.state import State
from tierkv.core.tenants import Tenant

__all__ = ["Remover"]

REMOVED_AT_ONCE = 1024


class Remover:
    """Unpublishes blocks because somebody said so. All methods block on the cold tier."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._placement = state.placement

    def delete(self, tenant: Tenant, namespace: str, chain_hash: bytes) -> int:
        """Unpublish one block in all groups and tiers, here and elsewhere; return how many were here."""
        with self._state.lock:
            info = self._state.namespace(namespace)
            keys = [tenant.block_key(chain_hash, group) for group in range(len(info.layouts))]
        removed = self._remove(keys, "deleted")
        if self._state.sharing is not None:
            self._state.sharing.delete(tenant.id, info.fingerprint, keys)
            removed += self._remove(keys, "deleted")  # what came back meanwhile
        return removed

    def clear(self, tenant: Tenant, namespace: str) -> int:
        """Unpublish a tenant's blocks of a namespace, here and elsewhere; return how many were here."""
        with self._state.lock:
            fingerprint = self._state.namespace(namespace).fingerprint
        removed = self._clear(tenant.id, fingerprint)
        if self._state.sharing is not None:
            self._state.sharing.clear(tenant.id, fingerprint)
            removed += self._clear(tenant.id, fingerprint)  # what came back meanwhile
        return removed

    def removed_elsewhere(self, tenant: bytes, namespace: bytes, keys: Sequence[bytes] | None) -> int:
        """Do as another machine has done: it has cleared a namespace, or deleted blocks of it."""
        return self._clear(tenant, namespace) if keys is None else self._remove(keys, "deleted")

    def _clear(self, tenant: bytes, namespace: bytes) -> int:
        with self._state.lock:
            entries = self._state.index.all_awake()
            found = {e.key for e in entries if e.meta.namespace == namespace and e.meta.tenant == tenant}
        cold = self._placement.cold
        if cold is not None:
            records = cold.records()
            found |= {key for key, meta in records if meta.namespace == namespace and meta.tenant == tenant}
        return self._remove(list(found), "cleared")

    def _remove(self, keys: Sequence[bytes], reason: str) -> int:
        """Unpublish blocks, some at a time so that others get their turn; return how many there were."""
        index, removed = self._state.index, 0
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            with self._state.lock:
                entries = map(index.wake, keys[start : start + REMOVED_AT_ONCE])
                live = [entry for entry in entries if entry is not None]
                in_cold = [entry.key for entry in live if self._placement.let_go(entry, reason)]
            removed += len(live)
            if self._placement.cold is not None:
                purge(self._placement.cold, in_cold, self._state)
        return removed
