"""What many blocks have in common, kept once: a *family* is a KV group of one namespace of one tenant.

A record spells it out in 44 bytes, an entry in memory has a name of 4. A family is known as long as it has blocks; a
name is never given twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.storage.cold import record

__all__ = ["Families"]


@dataclass(slots=True)
class _Family:
    common: bytes
    blocks: int = 0


class Families:
    """Families by name, and what each tenant's blocks add up to. Not thread-safe: the table calls it under its lock.

    Attributes
    ----------
    payload_by_tenant
        Sum of the payload lengths in bytes, by tenant. Tenants without any payload are left out.
    """

    def __init__(self) -> None:
        self._families: dict[bytes, _Family] = {}
        self._names: dict[bytes, bytes] = {}
        self._given = 0
        self.payload_by_tenant: dict[bytes, int] = {}

    def name(self, common: bytes) -> bytes:
        """Return the name of a family, a new one for a family not known; `enter` its first blocks next."""
        name = self._names.get(common)
        if name is None:
            name = self._given.to_bytes(record.FAMILY_BYTES, "little")
            self._given += 1
            self._names[common] = name
            self._families[name] = _Family(common)
        return name

    def common(self, name: bytes) -> bytes:
        """Return what the blocks of a family have in common, as their records spell it."""
        return self._families[name].common

    def all(self) -> dict[bytes, bytes]:
        """Return what is `common` to every family there is, by name."""
        return {name: family.common for name, family in self._families.items()}

    def of_tenant(self, tenant: bytes) -> set[bytes]:
        """Return the names of a tenant's families."""
        return {name for name, family in self._families.items() if record.tenant(family.common) == tenant}

    def enter(self, name: bytes, blocks: int, payload_bytes: int) -> None:
        """Count blocks in."""
        family = self._families[name]
        family.blocks += blocks
        self._add(family, payload_bytes)

    def leave(self, name: bytes, payload_bytes: int) -> None:
        """Count one block out."""
        family = self._families[name]
        family.blocks -= 1
        self._add(family, -payload_bytes)
        if not family.blocks:
            del self._families[name], self._names[family.common]

    def clear(self) -> None:
        """Forget all families."""
        self._families.clear()
        self._names.clear()
        self.payload_by_tenant.clear()

    def _add(self, family: _Family, payload_bytes: int) -> None:
        tenant = record.tenant(family.common)
        total = self.payload_by_tenant.get(tenant, 0) + payload_bytes
        if total:
            self.payload_by_tenant[tenant] = total
        else:
            self.payload_by_tenant.pop(tenant, None)
