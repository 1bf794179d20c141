"""Who a block belongs to: tenants, their keys, their rules, and what is counted for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from tierkv.errors import LimitExceeded
from tierkv.keys import block_key, share_key, tenant_key

__all__ = ["DEFAULT_RULES", "Tenant", "TenantCounters", "TenantRules", "Tenants"]


@dataclass(frozen=True, slots=True)
class TenantRules:
    """What an operator granted a tenant.

    Attributes
    ----------
    weight
        Its share of a full tier is in proportion to this, among the tenants that use the tier.
    scope
        Share scope: its members read and write each other's blocks. Empty: the tenant is alone with its own.
    quotas
        Most bytes of a tier, by tier name.
    """

    weight: float = 1.0
    scope: str = ""
    quotas: Mapping[str, int] = field(default_factory=dict)


DEFAULT_RULES = TenantRules()


@dataclass(slots=True)
class TenantCounters:
    """Totals of one tenant since start; as in `tierkv.core.counters.Counters`."""

    requested_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    stored_bytes: int = 0
    evicted_blocks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant: its display name, the secret key its blocks are named with (that of its share scope, if it has one),
    the 8-byte id its blocks are counted under, and its rules."""

    name: str
    key: bytes
    id: bytes
    rules: TenantRules = DEFAULT_RULES
    counters: TenantCounters = field(default_factory=TenantCounters)

    def block_key(self, chain_hash: bytes, group: int) -> bytes:
        return block_key(self.key, chain_hash, group)


class Tenants:
    """The tenants of one cache, by name and by id.

    Parameters
    ----------
    secret
        Server secret all keys are derived from.
    rules
        By tenant name; all others have `DEFAULT_RULES`.
    most
        How many tenants may be known at once.
    """

    def __init__(self, secret: bytes, rules: Mapping[str, TenantRules], most: int) -> None:
        self._secret = secret
        self._rules = rules
        self._most = max(most, len(rules))
        self._by_name: dict[str, Tenant] = {}
        self._by_id: dict[bytes, Tenant] = {}
        for name in rules:
            self.named(name)

    def named(self, name: str) -> Tenant:
        """Return a tenant, deriving its key on first sight. Raises `LimitExceeded` for one too many."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self._by_name) >= self._most:
                raise LimitExceeded(
                    f"{self._most} tenants are known already", remedy="raise limits.tenants, or use fewer tenant names"
                )
            rules = self._rules.get(name, DEFAULT_RULES)
            own = tenant_key(self._secret, name)
            key = share_key(self._secret, rules.scope) if rules.scope else own
            tenant = Tenant(name, key, blake2b(b"id", digest_size=8, key=own).digest(), rules)
            self._by_id[tenant.id] = tenant
            self._by_name[name] = tenant
        return tenant

    def regrant(self, rules: Mapping[str, TenantRules], most: int) -> bool:
        """Replace all rules; say whether one asks for another share scope of a tenant.

        A tenant known already keeps the one it has: its blocks are named by it.
        """
        self._rules = rules
        self._most = max(most, len(rules))
        moved = False
        for known in list(self._by_name.values()):
            wanted = rules.get(known.name, DEFAULT_RULES)
            moved |= wanted.scope != known.rules.scope
            granted = replace(wanted, scope=known.rules.scope)
            self._by_name[known.name] = self._by_id[known.id] = replace(known, rules=granted)
        for name in rules:
            self.named(name)
        return moved

    def of(self, tenant_id: bytes) -> Tenant | None:
        """Return the tenant with this id; None for one whose blocks outlived a restart and who was not seen since."""
        return self._by_id.get(tenant_id)

    def rules_of(self, tenant_id: bytes) -> TenantRules:
        tenant = self._by_id.get(tenant_id)
        return tenant.rules if tenant is not None else DEFAULT_RULES

    def to_dict(self, used: Mapping[bytes, Mapping[str, int]]) -> dict[str, Any]:
        """Plain data for stats. `used`: bytes by tenant id and tier name."""
        return {
            tenant.name: {
                "weight": tenant.rules.weight,
                "scope": tenant.rules.scope,
                "quotas": dict(tenant.rules.quotas),
                "used_bytes": dict(used.get(tenant.id, {})),
                "requested_tokens": tenant.counters.requested_tokens,
                "hit_tokens": dict(tenant.counters.hit_tokens),
                "stored_bytes": tenant.counters.stored_bytes,
                "evicted_blocks": dict(tenant.counters.evicted_blocks),
            }
            for tenant in list(self._by_name.values())
        }
