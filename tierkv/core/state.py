"""What the parts of the engine share: one lock, and the tables it protects."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from tierkv.core.counters import Counters
from tierkv.core.index import Index
from tierkv.core.keying import KeyMemo
from tierkv.core.leases import Draft, LeaseTable, WriteRecord
from tierkv.core.ledger import Ledger
from tierkv.core.pinning import Breakpoints
from tierkv.core.placement import Placement
from tierkv.core.rates import DeliveryRates, PrefillRates
from tierkv.core.sessions import SessionTable
from tierkv.core.tenants import Tenants
from tierkv.errors import NotFound
from tierkv.spec import BlockLayout, KVSpec
from tierkv.storage.tier import BlockMeta, Slot, SlotTier

if TYPE_CHECKING:
    from tierkv.core.observing import Observer
    from tierkv.core.sharing.sharing import Sharing

__all__ = ["NamespaceInfo", "Room", "State"]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A registered spec with what is derived from it."""

    name: str
    fingerprint: bytes
    spec: KVSpec
    layouts: tuple[BlockLayout, ...]
    sizes: tuple[int, ...]


class Room:
    """Tells those who wait that room may have become free."""

    def __init__(self) -> None:
        self._next: Future[None] = Future()

    def next(self) -> Future[None]:
        """Return a future that the next `signal` completes."""
        return self._next

    def signal(self) -> None:
        done, self._next = self._next, Future()
        done.set_result(None)


@dataclass(slots=True)
class State:
    """Everything below is read and written with `lock` held; no bytes are copied, hashed or written meanwhile.

    Attributes
    ----------
    writing
        Blocks some lease is writing, by key.
    waiting
        Written blocks by the key of the predecessor they wait for.
    quarantine
        Slots of writers that lost their lease, with the monotonic time when they may be reused.
    breakpoints
        Pins that hits renew.
    sharing
        The shared tier, if there is one.
    observers
        Who is told of requests.
    """

    placement: Placement
    index: Index
    ledger: Ledger
    lock: Lock
    tenants: Tenants
    sessions: SessionTable
    keys: KeyMemo = field(default_factory=KeyMemo)
    delivery_rates: DeliveryRates = field(default_factory=DeliveryRates)
    prefill_rates: PrefillRates = field(default_factory=PrefillRates)
    leases: LeaseTable = field(default_factory=LeaseTable)
    namespaces: dict[str, NamespaceInfo] = field(default_factory=dict)
    writing: dict[bytes, Draft] = field(default_factory=dict)
    waiting: dict[bytes, list[tuple[WriteRecord, Draft]]] = field(default_factory=dict)
    quarantine: list[tuple[float, SlotTier, Slot]] = field(default_factory=list)
    room: Room = field(default_factory=Room)
    breakpoints: Breakpoints = field(default_factory=Breakpoints)
    sharing: Sharing | None = None
    observers: tuple[Observer, ...] = ()

    @property
    def counters(self) -> Counters:
        """Totals since start."""
        return self.ledger.counters

    def coded(self, meta: BlockMeta) -> BlockMeta:
        """Add what codecs need to know, which the block's namespace says; blocks get into memory by registered ones."""
        info = self.namespaces[meta.namespace.hex()]
        return meta._replace(layout=info.layouts[meta.group], codec=info.spec.codec(meta.depth))

    def namespace(self, name: str) -> NamespaceInfo:
        """Return a registered namespace or raise `NotFound`."""
        try:
            return self.namespaces[name]
        except KeyError:
            raise NotFound(f"namespace {name[:64]!r} is not registered", remedy="register its spec first") from None
