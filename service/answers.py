"""What the daemon answers, as types: the schemas of the OpenAPI document. docs/wire.md explains rows and fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkv.cache import GrantState
from tierkv.connected import NodeFailure
from tierkv.keys import TENANT_NAME
from tierkv.storage.cold.tier import SegmentState

__all__ = [
    "Accepted",
    "Acquired",
    "Attached",
    "Breakpoints",
    "Done",
    "Ended",
    "Extended",
    "Health",
    "Held",
    "Hit",
    "Insight",
    "Namespace",
    "Namespaces",
    "NodeHit",
    "PeerHit",
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
    "TracePage",
    "Trunks",
    "Unpinned",
    "Where",
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


class NodeHit(_Answer):
    """What one node holds of a prefix, or why it does not say."""

    node: str | None
    url: str | None
    """Where it was asked; null for the node that answers."""
    blocks: Count
    tokens: Count
    tokens_by_tier: Counts
    error: NodeFailure | None
    detail: str
    age_s: Seconds | None
    """Since it last answered; null for never."""


class Where(_Answer):
    blocks: Count
    """How many were asked for."""
    nodes: list[NodeHit]


class PeerHit(_Answer):
    """What one node tells another; `instance` names this run of it."""

    node: Annotated[str, Field(pattern=f"^{TENANT_NAME.pattern}$")]
    instance: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    blocks: Count
    tokens: Count
    tokens_by_tier: Counts


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


class Breakpoint(_Answer):
    tokens: Count
    """How many it holds: the published ones in whole blocks."""
    blocks: Count
    nbytes: Count
    ttl_s: Seconds
    """From its last hit."""


class Breakpoints(_Answer):
    breakpoints: list[Breakpoint]
    """In the order of the request."""


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
    shared: dict[str, Any] | None = None
    insight: dict[str, Any] | None = None


class InsightTally(_Answer):
    """Hit and lost tokens add up to those requested; causes are listed in docs/insight.md."""

    requests: Count
    requested_tokens: Count
    hit_tokens: Counts
    lost_tokens: Counts
    lost_s: dict[str, Seconds]
    lost_price: dict[str, float] | None


class InsightRegret(_Answer):
    tokens: Count
    lost_tokens: Count
    """Of them: what no tier had any more."""
    within: Counts


class InsightTenant(InsightTally):
    regret: dict[TierName, InsightRegret]
    audits: dict[str, Any] | None


class InsightDivergence(_Answer):
    token: Count
    requests: Count
    share: Annotated[float, Field(ge=0)]
    lost_tokens: Count
    text: dict[str, Any] | None = None


class InsightTemplate(InsightTally):
    id: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    label: str | None
    parent: str | None
    tenant: str
    namespace: Hash
    model: str | None
    start: Count
    end: Count
    entered: Count
    divergences: list[InsightDivergence]
    text: list[int] | None = None


class InsightRate(_Answer):
    tier: TierName
    factor: float
    capacity_blocks: Count
    hit_blocks: Count
    hit_rate: Annotated[float, Field(ge=0, le=1)]


class WhatIf(_Answer):
    since: Seconds
    block_bytes: Count
    mixed: bool
    blocks: Count
    rates: list[InsightRate]


class Insight(InsightTally):
    """Documented in docs/insight.md."""

    enabled: bool
    since: Seconds
    window_s: Seconds | None
    """That was asked for, None: all since the start."""
    sample: float
    dropped: Count
    tenants: dict[str, InsightTenant]
    templates: list[InsightTemplate]
    rest: InsightTally
    whatif: WhatIf | None


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


class TraceRow(_Answer):
    """A request, with hashes for names."""

    timestamp: int
    """Arrival, milliseconds since the epoch."""
    input_length: Count
    output_length: Count
    hash_ids: list[Count]
    session_id: str | None = None
    tenant: str
    block_tokens: Annotated[int, Field(ge=1)]


class TracePage(_Answer):
    rows: list[TraceRow]
    last: Count
    missed: Count | None
