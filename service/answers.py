"""What the daemon answers, as types: the schemas of the OpenAPI document. docs/wire.md explains rows and fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkv.cache import GrantState
from tierkv.storage.cold.tier import SegmentState

__all__ = [
    "Accepted",
    "Acquired",
    "Attached",
    "Done",
    "Ended",
    "Extended",
    "Health",
    "Held",
    "Hit",
    "Namespace",
    "Namespaces",
    "Pinned",
    "Problem",
    "Progress",
    "Readiness",
    "Removed",
    "Reserved",
    "Segments",
    "Stats",
    "StoredBlock",
    "Tenants",
    "Ticket",
    "Trunks",
    "Unpinned",
]

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
TierName = str
Counts = dict[str, int]


class _Answer(BaseModel):
    """New fields may be added to any answer."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class Problem(_Answer):
    """RFC 9457. `type` is ``urn:tierkv:problem:`` and a word that stays; problems of corruption also have `cause`."""

    type: Annotated[str, Field(pattern="^urn:tierkv:problem:[a-z-]+$")]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    remedy: str


class Done(_Answer):
    """Nothing to say."""


class Namespace(_Answer):
    namespace: Hash
    model: str
    block_tokens: Annotated[int, Field(ge=1)]
    block_bytes: list[int]
    """One size for each KV group."""


class Namespaces(_Answer):
    namespaces: list[Namespace]


class Removed(_Answer):
    removed: Count


class Hit(_Answer):
    blocks: Count
    tokens: Count
    tiers: list[TierName]


class Ticket(_Answer):
    ticket: str


class Progress(_Answer):
    state: Literal["loading", "done", "cancelled"]
    blocks_total: Count
    blocks_done: Count
    bytes_total: Count
    bytes_done: Count


class Choice(_Answer):
    reason: str
    load_blocks: Count
    load_s: Seconds
    recompute_s: Seconds


class Acquired(_Answer):
    lease: str
    ttl_s: Seconds
    blocks: list[tuple[int, int, TierName, int, int, Checksum]]
    """Index, group, tier, offset, length, checksum."""
    hit_blocks: Count
    hit_tokens: Count
    published_blocks: Count
    tokens_by_tier: Counts
    missed_tokens: Counts
    saved_s: Seconds
    waited_s: Seconds
    choice: Choice
    compute: tuple[str, int, int] | None
    """Compute lease, first block, end."""
    computed_elsewhere: bool


class Reserved(_Answer):
    lease: str
    ttl_s: Seconds
    grants: list[tuple[int, int, GrantState, TierName, int, int]]
    """Index, group, state, tier, offset, length."""
    waited_s: Seconds


class Accepted(_Answer):
    accepted: Count


class Extended(_Answer):
    ttl_s: Seconds


class Pinned(_Answer):
    blocks: Count
    nbytes: Count
    ttl_s: Seconds


class Unpinned(_Answer):
    blocks: Count


class Ended(_Answer):
    retired: Count


class Held(_Answer):
    held: Count


class StoredBlock(_Answer):
    stored: bool
    """False: it was there already."""
    length: Count
    checksum: Checksum
    """Of the block that is there now."""
    depth: Count
    """Blocks before it in its chain."""


class Mapped(_Answer):
    tier: TierName
    path: str
    generation: Checksum
    directory: tuple[int, int] | None = None
    """Offset and size in bytes; only of the warm tier."""


class OnDevice(_Answer):
    tier: TierName
    bus_id: str
    """PCI bus id of the GPU."""
    nbytes: Count
    handle: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
    """CUDA IPC handle, 64 bytes; binary in msgpack."""


class Attached(_Answer):
    generation: str
    segments: list[Mapped]
    device: OnDevice | None
    tenant_key: Hash
    """Binary in msgpack."""


class Segment(_Answer):
    name: str
    size: Count
    sequence: Count
    state: SegmentState
    blocks: Count


class Segments(_Answer):
    capacity_bytes: Count
    used_bytes: Count
    segments: list[Segment]
    damage: Counts
    findings: list[str]


class Tenant(_Answer):
    weight: float
    scope: str
    quotas: Counts
    used_bytes: Counts
    requested_tokens: Count
    hit_tokens: Counts
    stored_bytes: Count
    evicted_blocks: Counts


class Tenants(_Answer):
    tenants: dict[str, Tenant]


class Stats(_Answer):
    """Documented in docs/metrics.md."""

    generation: str
    uptime_s: Seconds
    published_blocks: Count
    namespaces: Count
    sessions: Count
    quarantined_slots: Count
    leases: Counts
    loads: Counts
    dirty_bytes: Counts
    counters: dict[str, Any]
    http: dict[str, Any]
    tenants: dict[str, Tenant]
    tiers: dict[TierName, dict[str, Any]]


class Health(_Answer):
    status: Literal["ok"]


class Readiness(_Answer):
    ready: bool
    reasons: list[str]


class Trunk(_Answer):
    id: str
    parent: str | None
    tenant: str | None
    namespace: Hash
    model: str | None
    depth: Count
    blocks: Count
    tokens: int | None
    nbytes: Count
    branches: Count
    uses: Count
    unused_s: Seconds | None


class Trunks(_Answer):
    trunks: list[Trunk]
