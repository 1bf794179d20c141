"""A recount of the engine's books: what every table says about every block, slot and lease must be the same story.

All functions are called with the engine's lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tierkv.core.engine import Engine
from tierkv.core.index import Entry
from tierkv.core.leases import ComputeRecord, PinRecord, ReadRecord, WriteRecord
from tierkv.storage.directory import DirectoryReader, Place
from tierkv.storage.superblocks import slot_bytes
from tierkv.storage.tier import SupportsQuotas
from tierkv.storage.warm import WarmTier

__all__ = ["at_rest", "check_cold", "check_counters", "check_holds", "check_leases", "check_places", "check_room"]


def at_rest(engine: Engine) -> bool:
    """No load is queued or running."""
    return not engine._loader._running


def check_places(engine: Engine) -> None:
    """Tiers, index, eviction orders, dirty lists and the arena's directory agree on who lies where."""
    state = engine._state
    index, placement = state.index, state.placement
    awake = index._awake
    cold_bit = 1 << placement.cold_level if placement.cold is not None else 0
    for key, entry in awake.items():
        assert entry.key == key
        assert entry.levels, "a block that no tier holds is published"
        assert entry.levels != cold_bit or entry.pins, "a block is awake that is not in memory and that nobody uses"
    for level, memory in enumerate(placement.memory):
        resident = dict(memory.tier.records())
        known = {key for key, entry in awake.items() if entry.levels >> level & 1}
        assert resident.keys() == known
        ordered = [key for share in memory.order._shares.values() for key in share.policy.victims()]
        assert sorted(ordered) == sorted(known)
        dirty = {key for key in known if level < placement._last and not awake[key].below(level)}
        assert memory.dirty.keys() == dirty
        assert memory.dirty_bytes == sum(awake[key].meta.length for key in dirty)
        for key, meta in resident.items():
            assert (meta.tenant, meta.checksum) == (awake[key].meta.tenant, awake[key].meta.checksum)
    warm = placement.memory[-1].tier
    if isinstance(warm, WarmTier):
        check_directory(warm, awake)


def check_directory(warm: WarmTier, awake: dict[bytes, Entry]) -> None:
    reader = DirectoryReader(warm.shared()[1])
    for key, entry in awake.items():
        slot, found = warm.slot(key), reader.find(key)
        if slot is None:
            assert found is None, "a block that is not in the arena is listed there"
        else:
            assert found is None or found == Place(slot.offset, entry.meta.length, entry.meta.checksum)


def check_leases(engine: Engine) -> None:
    """Every draft belongs to a lease that is alive or about to be, and what waits, waits for something."""
    state = engine._state
    drafts = {
        draft.key: draft
        for lease in state.leases._live.values()
        if isinstance(lease, WriteRecord)
        for draft in lease.drafts.values()
    }
    for key, draft in drafts.items():
        assert state.writing[key] is draft
    for key in state.writing:
        assert key not in state.index, "a published block is being written"
    for parent, waiting in state.waiting.items():
        assert parent not in state.index, "a written block waits for one that is published"
        for lease, draft in waiting:
            assert draft.written
            assert lease.drafts[draft.index, draft.meta.group] is draft
    held = Counter(lease.tenant for lease in state.leases._live.values())
    assert state.leases._held == held
    computed: Counter[str] = Counter()
    for key, compute in engine._computing._computing.items():
        assert state.leases._live.get(compute.id) is compute, "a compute lease that has ended covers a block"
        assert key in compute.keys
        computed[compute.id] += 1
    for live in state.leases._live.values():
        if isinstance(live, ComputeRecord):
            assert live.left, "a compute lease has nothing left to compute"
            assert len(live.keys) == computed[live.id]
    pins = [lease for lease in state.leases._live.values() if isinstance(lease, PinRecord)]
    assert {id(pin) for pin in pins} == {id(pin) for pin in engine.hints._pins.values()}
    holds: dict[bytes, Counter[bytes]] = {}
    sizes: dict[bytes, dict[bytes, int]] = {}
    for pin in pins:
        holds.setdefault(pin.tenant, Counter()).update(entry.key for entry in pin.entries)
        sizes.setdefault(pin.tenant, {}).update((entry.key, entry.meta.length) for entry in pin.entries)
    assert engine.hints._pinned._holds == holds
    assert engine.hints._pinned._nbytes == {tenant: sum(lengths.values()) for tenant, lengths in sizes.items()}
    marked = [pin for pins in state.breakpoints._marked.values() for pin in pins.values()]
    assert {id(pin) for pin in marked} == {id(pin) for pin in pins if pin.mark is not None}


def check_holds(engine: Engine, now: float, *, exactly: bool) -> None:
    """Every pin of a block is somebody's: a lease's, or (unless `exactly`) a running copy's or request's."""
    state = engine._state
    held: Counter[int] = Counter()
    entries: dict[int, Entry] = {id(entry): entry for entry in state.index._awake.values()}
    for entry in _leased(engine):
        held[id(entry)] += 1
        entries[id(entry)] = entry
    for name, entry in entries.items():
        assert entry.pins >= held[name], "a lease lost its hold of a block"
        assert not exactly or entry.pins == held[name], "a block is pinned for nobody"
        assert entry.pins or not entry.withdrawn, "the slot of a deleted block was never given back"
    wanted: Counter[int] = Counter()
    for ticket in engine.prefetcher._tickets.values():
        assert ticket.over or ticket.stale > now, "a prefetch outlived its deadline"
        if not ticket.over:
            wanted.update(id(part.load) for part in ticket.loads)
            wanted.update(id(part.load.then) for part in ticket.loads if part.onward and part.load.then is not None)
    for load in engine._loader._running.values():
        assert load.wanted >= wanted[id(load)], "a ticket lost its load"


def check_room(engine: Engine, *, exactly: bool) -> None:
    """Every slot in use is accounted for and counted to its tenant; nobody is over its quota.

    Not `exactly`: loads, demotions and waiting reservations may have slots that no table shows.
    """
    state = engine._state
    quarantined: Counter[str] = Counter(tier.name for _, tier, _ in state.quarantine)
    withdrawn: Counter[str] = Counter()
    for entry in {id(entry): entry for entry in _leased(engine)}.values():
        withdrawn.update(tier.name for tier, _ in entry.withdrawn or ())
    for level, memory in enumerate(state.placement.memory):
        tier = memory.tier
        resident = list(tier.records())
        drafts = [draft for draft in state.writing.values() if draft.level == level]
        used: Counter[bytes] = Counter()
        for _, meta in resident:
            used[meta.tenant] += slot_bytes(meta.length)
        for draft in drafts:
            used[draft.meta.tenant] += draft.slot.size
        slots = len(resident) + len(drafts) + quarantined[tier.name] + withdrawn[tier.name]
        counted = memory.order.used()
        in_use = tier.allocator.usage().slots  # type: ignore[attr-defined]
        if exactly:
            assert in_use == slots, f"{in_use} slots of the {tier.name} tier are in use, {slots} are accounted for"
            assert counted == dict(used), "the bytes counted to a tenant are not those it has"
        else:
            assert in_use >= slots
            assert all(counted.get(tenant, 0) >= nbytes for tenant, nbytes in used.items())
        for tenant, nbytes in counted.items():
            quota = state.tenants.rules_of(tenant).quotas.get(tier.name)
            assert quota is None or nbytes <= quota, "a tenant is over its quota in memory"


def check_cold(engine: Engine) -> None:
    """Nothing is half put or half deleted, and quotas hold. With no demotion running."""
    state = engine._state
    index, cold = state.index, state.placement.cold
    assert not index.arriving
    assert not index.purging
    assert not index.condemned
    if cold is None:
        return
    bit = 1 << state.placement.cold_level
    assert all(cold.has(key) for key, entry in index._awake.items() if entry.levels & bit)
    by_tenant = cold.payload_by_tenant() if isinstance(cold, SupportsQuotas) else {}
    recount: Counter[bytes] = Counter()
    for _, meta in cold.records():
        recount[meta.tenant] += meta.length
    assert by_tenant == dict(recount)
    for tenant, nbytes in recount.items():
        quota = state.tenants.rules_of(tenant).quotas.get("cold")
        assert quota is None or nbytes <= quota, "a tenant is over its quota in the cold tier"


def check_counters(engine: Engine) -> None:
    """Every token asked for is a hit or a miss with a reason, and tenants add up to the whole."""
    state = engine._state
    counters = state.counters
    tenants = list(state.tenants._by_name.values())
    block_tokens = {info.spec.block_tokens for info in state.namespaces.values()}
    assert min(counters.missed_blocks.values(), default=0) >= 0
    missed = sum(counters.missed_blocks.values()) * block_tokens.pop() if block_tokens else 0
    assert sum(counters.hit_tokens.values()) + missed == counters.requested_tokens
    assert sum(tenant.counters.requested_tokens for tenant in tenants) == counters.requested_tokens
    assert sum(tenant.counters.stored_bytes for tenant in tenants) == counters.stored_bytes
    assert _total(tenant.counters.hit_tokens for tenant in tenants) == counters.hit_tokens
    evicted = Counter({k: n for k, n in counters.evicted_blocks.items() if k != "cold"})
    assert _total(tenant.counters.evicted_blocks for tenant in tenants) == evicted
    leases = counters.compute_leases
    over = leases["done"] + leases["ended"] + leases["expired"]
    assert leases["granted"] == over + state.leases.counts()["compute"]


def _leased(engine: Engine) -> Iterator[Entry]:
    """Every hold that a lease has on a block."""
    for lease in engine._state.leases._live.values():
        if isinstance(lease, ReadRecord | PinRecord):
            yield from lease.entries
        elif isinstance(lease, WriteRecord) and engine.writer._hold:
            yield from lease.chain
            yield from lease.published


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total
