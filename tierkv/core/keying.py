"""Storage keys of chains, derived once per chain however often a request comes back with it.

A request looks up, acquires, reserves and commits the same chain. Its keys are keyed hashes, half a microsecond each;
a small memo of the chains seen last keeps them for that while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from tierkv.core.tenants import Tenant
from tierkv.keys import HASH_BYTES

__all__ = ["ChainKeys", "KeyMemo"]

_CHAINS = 64


class ChainKeys:
    """The storage keys of one tenant's chain, derived as far as they are asked for."""

    __slots__ = ("_hasher", "_hashes", "_keys")

    def __init__(self, tenant_key: bytes, hashes: Sequence[bytes]) -> None:
        self._hasher = blake2b(digest_size=HASH_BYTES, key=tenant_key)
        self._hashes = hashes
        self._keys: dict[int, list[bytes]] = {}

    def upto(self, group: int, count: int) -> list[bytes]:
        """Return the keys of a KV group: at least the first `count` of them (not to be changed)."""
        keys = self._keys.get(group)
        if keys is None:
            keys = self._keys[group] = []
        if len(keys) < count:
            suffix = group.to_bytes(4, "little")
            for chain_hash in self._hashes[len(keys) : count]:
                hasher = self._hasher.copy()
                hasher.update(chain_hash + suffix)
                keys.append(hasher.digest())
        return keys

    def at(self, index: int, group: int) -> bytes:
        """Return one key."""
        keys = self._keys.get(group)
        if keys is None or index >= len(keys):
            keys = self.upto(group, index + 1)
        return keys[index]


class KeyMemo:
    """The keys of the chains seen last. For use with the engine's lock held."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, tuple[bytes, ...]], ChainKeys] = OrderedDict()

    def of(self, tenant: Tenant, hashes: Sequence[bytes]) -> ChainKeys:
        chain = hashes if isinstance(hashes, tuple) else tuple(hashes)
        known = self._seen.get((tenant.key, chain))
        if known is None:
            known = self._seen[tenant.key, chain] = ChainKeys(tenant.key, chain)
            if len(self._seen) > _CHAINS:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end((tenant.key, chain))
        return known
