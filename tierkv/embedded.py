"""The cache embedded in the caller's process: `tierkv.open(config)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkv.cache import (
    BlockRef,
    Cache,
    Chain,
    Grant,
    Hit,
    Pinned,
    Ticket,
    TicketProgress,
    WriteLease,
    Written,
)
from tierkv.config import Config
from tierkv.core.acquiring import Terms
from tierkv.core.build import build_engine
from tierkv.core.engine import Engine
from tierkv.core.steps import run
from tierkv.core.tenants import Tenant
from tierkv.direct import DirectReader, UseLog
from tierkv.handles import LeasedComputer, LeasedReader, LeasedWriter, LeaseHandle, read_leased, take_over
from tierkv.spec import KVSpec
from tierkv.storage.device import DeviceBlock
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.tier import Slot
from tierkv.storage.warm import WarmTier

__all__ = ["EmbeddedCache", "open_cache"]


def open_cache(config: Config, tenant: str = "default", *, on_device: bool = False) -> EmbeddedCache:
    """Build a cache in this process. Errors as `tierkv.core.build.build_engine`. Blocks while memory is allocated."""
    return EmbeddedCache(build_engine(config), tenant, on_device=on_device)


class EmbeddedCache(Cache):
    """One tenant's view of an engine in this process. Closing it closes the engine.

    `on_device`: blocks in a hot tier on a GPU are read there, see `tierkv.open`.
    """

    def __init__(self, engine: Engine, tenant: str, *, on_device: bool = False) -> None:
        self.engine = engine
        self._tenant = engine.tenant(tenant)
        self._plane = _EnginePlane(engine, self._tenant)
        tiers = [memory.tier for memory in engine.placement.memory]
        self._written = frozenset(tier.name for tier in tiers if tier.addressable)
        self._read = frozenset(tier.name for tier in tiers if tier.addressable or on_device)
        self._on_device = on_device
        warm = engine.placement.memory[-1].tier
        self._direct = DirectReader(*warm.shared(), self._tenant.key) if isinstance(warm, WarmTier) else None
        self._uses = UseLog(lambda ns, group, hashes: engine.uses.report(self._tenant, ns, group, hashes))

    def for_tenant(self, tenant: str) -> EmbeddedCache:
        """Another tenant's view of the same engine."""
        return EmbeddedCache(self.engine, tenant, on_device=self._on_device)

    def register(self, spec: KVSpec) -> str:
        return self.engine.register(spec).name

    def lookup(self, chain: Chain, *, wait_s: float = 0.0) -> Hit:
        return run(self.engine.reader.find(self._tenant, chain.namespace, chain.hashes, wait_s))

    def prefetch(self, chain: Chain, *, deadline_s: float = 60.0) -> Ticket:
        ticket = self.engine.prefetcher.start(self._tenant, chain.namespace, chain.hashes, deadline_s)
        return _EngineTicket(self.engine, self._tenant, ticket)

    def acquire(
        self,
        chain: Chain,
        *,
        wait_s: float = 10.0,
        ttl_s: float = 30.0,
        max_blocks: int | None = None,
        compute_s: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        session: str = "",
        groups: tuple[int, ...] | None = None,
        handoff: bool = False,
    ) -> LeasedReader:
        terms = Terms(self._read, wait_s, ttl_s, max_blocks, compute_s, prefill_tokens_per_s, session, groups, handoff)
        acquired = run(self.engine.reader.acquire(self._tenant, chain.namespace, chain.hashes, terms))
        grant = acquired.compute
        return LeasedReader(
            self._plane,
            acquired.id,
            acquired.blocks,
            hit_blocks=acquired.hit_blocks,
            hit_tokens=acquired.hit_tokens,
            published_blocks=acquired.published_blocks,
            tokens_by_tier=acquired.tokens_by_tier,
            missed_tokens=acquired.missed_tokens,
            saved_s=acquired.saved_s,
            waited_s=acquired.waited_s,
            choice=acquired.choice,
            compute=LeasedComputer(self._plane, grant.id, grant.start, grant.stop) if grant is not None else None,
            computed_elsewhere=acquired.computed_elsewhere,
            deadline=acquired.deadline,
        )

    def take_over(self, namespace: str, handle: LeaseHandle) -> LeasedReader:
        """Read under a lease that was handed over in this process, and release it. Does not wait."""
        return take_over(self._plane, handle)

    def read_into(self, chain: Chain, index: int, out: memoryview, *, group: int = 0, wait_s: float = 0.0) -> bool:
        if self._direct is None or not 0 <= index < len(chain):
            return read_leased(self, chain, index, out, group, wait_s)
        if not self._direct.read_into(chain.hashes[index], group, out):
            return read_leased(self, chain, index, out, group, wait_s)
        self._uses.note(chain.namespace, group, chain.hashes[index])
        return True

    def reserve(
        self,
        chain: Chain,
        *,
        start: int = 0,
        stop: int | None = None,
        wait_s: float = 1.0,
        ttl_s: float = 60.0,
        session: str = "",
    ) -> WriteLease:
        reserved = run(
            self.engine.writer.reserve(
                self._tenant,
                chain.namespace,
                chain.hashes,
                start=start,
                stop=stop,
                wait_s=wait_s,
                ttl_s=ttl_s,
                tiers=self._written,
                session=session,
            )
        )
        return LeasedWriter(
            self._plane,
            reserved.id,
            reserved.grants,
            deadline=reserved.deadline,
            publish=self._plane.commit_summed,
        )

    def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        return self.engine.hints.pin(self._tenant, chain.namespace, chain.hashes, ttl_s)

    def unpin(self, chain: Chain) -> int:
        return self.engine.hints.unpin(self._tenant, chain.namespace, chain.hashes)

    def end_session(self, namespace: str, session: str) -> int:
        return self.engine.hints.end_session(self._tenant, namespace, session)

    def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        return self.engine.hints.pause_session(self._tenant, namespace, session, expected_s)

    def delete(self, chain: Chain) -> int:
        return self.engine.delete(self._tenant, chain.namespace, chain.hashes[-1]) if chain.hashes else 0

    def clear(self, namespace: str) -> int:
        return self.engine.clear(self._tenant, namespace)

    def flush(self) -> None:
        self.engine.flush()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        self._direct = None
        self.engine.close()


class _EnginePlane:
    generation = ""

    def __init__(self, engine: Engine, tenant: Tenant) -> None:
        self._engine = engine
        self._tenant = tenant
        self._tiers = {memory.tier.name: memory.tier for memory in engine.placement.memory}

    def view(self, block: BlockRef | Grant) -> memoryview:
        tier, slot = self._tiers[block.tier], Slot(block.offset, block.length)
        if tier.addressable:
            return tier.view(slot, block.length)
        copy = memoryview(bytearray(block.length))
        tier.read(slot, copy)
        return copy

    def device_view(self, block: BlockRef) -> DeviceBlock | None:
        tier = self._tiers[block.tier]
        if not isinstance(tier, DeviceHotTier):
            return None
        return tier.device_block(Slot(block.offset, block.length), block.length)

    def commit(self, lease_id: str, written: Sequence[Written]) -> int:
        return self._engine.writer.commit(self._tenant, lease_id, written)

    def commit_summed(self, lease_id: str, written: Sequence[Written]) -> int:
        """Publish blocks whose sums were computed by this process from their slots."""
        return self._engine.writer.commit(self._tenant, lease_id, written, summed_here=True)

    def abort(self, lease_id: str) -> None:
        self._engine.writer.abort(self._tenant, lease_id)

    def release(self, lease_id: str, corrupt: Sequence[tuple[int, int]]) -> None:
        self._engine.release(self._tenant, lease_id, corrupt)

    def renew(self, lease_id: str, ttl_s: float) -> float:
        self._engine.renew(self._tenant, lease_id, ttl_s)
        return ttl_s


class _EngineTicket(Ticket):
    def __init__(self, engine: Engine, tenant: Tenant, ticket_id: str) -> None:
        self.id = ticket_id
        self._engine = engine
        self._tenant = tenant

    def progress(self) -> TicketProgress:
        return self._engine.prefetcher.progress(self._tenant, self.id)

    def wait(self, wait_s: float, *, groups: int | None = None) -> TicketProgress:
        return run(self._engine.prefetcher.wait(self._tenant, self.id, groups, wait_s))

    def cancel(self) -> None:
        self._engine.prefetcher.cancel(self._tenant, self.id)
