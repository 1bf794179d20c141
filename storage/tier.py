"""The contract of a tier: the whole of what the cache may ask of a place that keeps blocks.

A tier maps 32-byte keys to verified bytes. It knows nothing of tokens, prefixes, tenants or policy: what to keep is
decided above it. Two kinds exist:

    Tier        bytes go in and come out by copy (LMDB, object stores)
    SlotTier    memory tiers: blocks live in slots that callers write and read in place (arena, page pool)

Every implementation passes the same conformance suite. All methods are safe to call from any thread; none holds a lock
while bytes are copied, hashed or coded, so one slow block never stalls another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import xxhash

from tierkv.errors import BodyMismatch, CorruptBlock, InvalidRequest, NotFound, TierKVError, Unavailable
from tierkv.spec import BlockLayout

__all__ = [
    "NO_PARENT",
    "BlockMeta",
    "PendingCopies",
    "Slot",
    "SlotTier",
    "SupportsBatches",
    "SupportsContainers",
    "SupportsQuotas",
    "SupportsRecency",
    "Tier",
    "TierUsage",
    "checksum",
    "verify",
]

NO_PARENT = bytes(32)
Buffer = bytes | bytearray | memoryview
_GIL_FREE_COPY = 32 << 10


class BlockMeta(NamedTuple):
    """What a tier keeps about a block beside its bytes.

    Attributes
    ----------
    length, checksum
        Payload size in bytes, and its XXH3-64.
    parent
        Key of the block before this one in its chain, `NO_PARENT` for the first.
    namespace
        Fingerprint (32 bytes) the block belongs to.
    tenant
        First 8 bytes of a hash of the tenant's key: enough to count and clear, useless to guess.
    depth
        Blocks before this one in its chain.
    group
        KV group id.
    layout
        Shape and dtype for codecs; None means opaque bytes. Not persisted in an index (containers carry it).
    codec
        Codec to store the block with, empty: the tier's own choice. Tiers that do not code ignore it. Not persisted.
    """

    length: int
    checksum: int
    parent: bytes = NO_PARENT
    namespace: bytes = bytes(32)
    tenant: bytes = bytes(8)
    depth: int = 0
    group: int = 0
    layout: BlockLayout | None = None
    codec: str = ""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is, in bytes and blocks. `used_bytes` includes the tier's own overhead and padding."""

    capacity_bytes: int
    used_bytes: int
    payload_bytes: int
    blocks: int


class Slot(NamedTuple):
    """A place in a memory tier: `size` bytes from `offset` of the tier's memory."""

    offset: int
    size: int


def checksum(data: Buffer) -> int:
    """XXH3-64 of a buffer, the integrity sum of every payload."""
    return xxhash.xxh3_64_intdigest(data)


def verify(data: Buffer, meta: BlockMeta, where: str) -> None:
    """Raise `CorruptBlock` unless `data` is exactly what `meta` says."""
    if checksum(data) != meta.checksum:
        raise CorruptBlock(
            f"a block in the {where} tier does not match its checksum",
            remedy="it is removed; the next store repairs it",
        )


class Tier(ABC):
    """A place that keeps blocks by key."""

    name: ClassVar[str]

    @abstractmethod
    def put(self, key: bytes, payload: Buffer, meta: BlockMeta) -> None:
        """Keep a copy of `payload`, visible as soon as this returns. Blocks.

        A key that is present already is left as it is. Raises `BodyMismatch` when `payload` is not `meta.length` bytes,
        `TierFull` or `StorageFull` when there is no room, `BlockTooLarge` when there never can be.

        Where `meta.codec` is lossy, `read_into` gives other bytes than these, always the same until the block is put
        anew, and their checksum is the one that it and `meta` return.
        """

    def put_many(self, items: Sequence[tuple[bytes, Buffer, BlockMeta]]) -> list[TierKVError | None]:
        """Keep several blocks, one outcome each (None or the error). Tiers that batch override it."""
        outcomes: list[TierKVError | None] = []
        for key, payload, meta in items:
            try:
                self.put(key, payload, meta)
            except TierKVError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes

    @abstractmethod
    def read_into(self, key: bytes, out: memoryview) -> BlockMeta:
        """Fill the first `meta.length` bytes of `out` with the verified payload and return its meta. Blocks.

        Raises `NotFound` for an unknown key, `BodyMismatch` when `out` is too small, and `CorruptBlock` when the bytes
        fail verification: `out` then holds garbage, the block is gone from the tier, and the next put repairs it.
        """

    @abstractmethod
    def meta(self, key: bytes) -> BlockMeta | None:
        """Return what is known of a key without touching its bytes, or None."""

    def has(self, key: bytes) -> bool:
        """Say whether a block is there. Cheap."""
        return self.meta(key) is not None

    def holds(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first of `keys` are there without a gap: of a prompt's blocks, the stored prefix.

        Cheap, a lookup asks for thousands. Not a use of the blocks.
        """
        return next((count for count, key in enumerate(keys) if not self.has(key)), len(keys))

    @abstractmethod
    def delete(self, key: bytes) -> bool:
        """Forget a block; say whether it was there. Does not wait for readers in the middle of a copy."""

    @abstractmethod
    def records(self) -> Iterator[tuple[bytes, BlockMeta]]:
        """Yield every block, parents before their children where both were stored in that order."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Report capacity and use. Cheap."""

    @property
    def largest_block(self) -> int:
        """Bytes of the largest payload the tier can ever take."""
        return self.usage().capacity_bytes

    def describe(self) -> dict[str, Any]:
        """Report occupancy as plain data for stats; tiers add what is particular to them."""
        return asdict(self.usage())

    def flush(self) -> None:
        """Make everything put so far survive what the tier promises to survive. Blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and locks. Idempotent; every other method raises `Unavailable` afterwards."""


@runtime_checkable
class SupportsRecency(Protocol):
    """A tier that chooses its own victims and wants to know what is used."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note uses, the least recent first. Cheap; unknown keys are ignored."""


@runtime_checkable
class SupportsQuotas(Protocol):
    """A tier that knows what each tenant takes of it, and can make a tenant smaller."""

    def payload_by_tenant(self) -> dict[bytes, int]:
        """Return the payload bytes that each tenant has stored, by `BlockMeta.tenant`. Cheap.

        Tenants without any are left out. The values sum to the `payload_bytes` of `Tier.usage`, also after a restart.
        """

    def trim(self, tenant: bytes, payload_bytes: int) -> int:
        """Evict a tenant's oldest blocks until it has at most `payload_bytes` stored; return how many. Blocks.

        They are reported like blocks evicted to make room, and stay away as those that were deleted do. Raises
        `InvalidRequest` for less than 0 bytes.
        """


@runtime_checkable
class SupportsContainers(Protocol):
    """A tier that stores blocks coded, and gives them away as they are."""

    def read_container(self, key: bytes) -> tuple[Buffer, BlockMeta]:
        """Return a block's container (see `tierkv.storage.container`), the caller's to keep, and its meta. Blocks.

        Raises as `Tier.read_into`; what the container decodes to is for its reader to verify.
        """


class PendingCopies(Protocol):
    """Copies under way. Until `wait` has returned or raised, both of their ends belong to them."""

    def wait(self) -> None:
        """Wait for all of them. Raises `DeviceError` when one has failed: then none of the blocks counts as copied."""


@runtime_checkable
class SupportsBatches(Protocol):
    """A memory tier that copies many blocks at once while its caller goes on."""

    @property
    def batch_bytes(self) -> int:
        """How much is worth copying at once."""

    @property
    def usable(self) -> bool:
        """Whether it copies at all."""

    def copy_in(self, items: Iterable[tuple[Slot, Buffer]]) -> PendingCopies:
        """Begin to fill slots with payloads, which stay as they are until the copies are over.

        Draws the next item while the one before is copied. When it raises, whatever it raises, nothing is under way any
        more. Raises `DeviceError`, and what drawing from `items` raises.
        """

    def landed(self, items: Sequence[tuple[Slot, int]]) -> Sequence[int | None]:
        """Return the checksum of the first so many bytes of slots as they are now; None for one nobody has summed."""


@dataclass(slots=True)
class _Resident:
    slot: Slot
    meta: BlockMeta


class SlotTier(Tier):
    """A memory tier: fixed slots inside one addressable piece of memory.

    A slot is private to whoever allocated it until `publish`; afterwards readers find it by key. The tier never moves
    a block. It does not count readers either: whoever deletes a key first makes sure that nobody uses its slot.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._resident: dict[bytes, _Resident] = {}
        self._key_at: dict[int, bytes] = {}
        self._payload_bytes = 0
        self._closed = False

    @property
    def addressable(self) -> bool:
        """Whether the CPU can address slots, so that `view` works."""
        return True

    @abstractmethod
    def slots_for(self, length: int) -> int:
        """Return how many blocks of `length` bytes the tier could hold if it held nothing else."""

    @abstractmethod
    def slot_size(self, length: int) -> int:
        """Return the size of the slots that blocks of `length` bytes are put in. Raises `BlockTooLarge`."""

    @abstractmethod
    def take(self, length: int) -> Slot | None:
        """Take a slot for `length` bytes; None when there is none free. Raises `BlockTooLarge`. Never blocks."""

    @abstractmethod
    def allocate(self, length: int) -> Slot:
        """As `take`, but raises `TierFull` when there is none free: evict, then retry."""

    @abstractmethod
    def discard(self, slot: Slot) -> None:
        """Give back a slot that no key refers to."""

    @abstractmethod
    def view(self, slot: Slot, length: int) -> memoryview:
        """Return the first `length` bytes of a slot, writable, valid until the slot is given back.

        Raises `DeviceError` when the tier's memory cannot be addressed from the CPU; use `write` and `read` then.
        """

    @abstractmethod
    def neighbours(self, slot: Slot, length: int) -> list[Slot]:
        """Return the slots that must all be given back before `slot`'s memory can hold `length` bytes.

        Just `slot` itself when it is of the right size, else every slot in use around it.
        """

    def write(self, slot: Slot, payload: Buffer) -> None:
        """Copy `payload` to the start of a slot. Blocks; does not hold the GIL for large payloads."""
        _copy(self.view(slot, len(payload)), payload)

    def read(self, slot: Slot, out: memoryview) -> None:
        """Fill `out` from the start of a slot, unverified. Blocks; does not hold the GIL for large blocks."""
        _copy(out, self.view(slot, len(out)))

    def publish(self, key: bytes, slot: Slot, meta: BlockMeta) -> None:
        """Make a written slot readable under `key`. The key must not be present."""
        if not self._publish(key, slot, meta):
            raise ValueError("publish of a key that is already resident")

    def withdraw(self, key: bytes) -> Slot | None:
        """Make a key unknown but leave its slot allocated, for readers still at it; `discard` gives it back later."""
        with self._lock:
            self._check_open()
            found = self._resident.get(key)
            if found is None:
                return None
            self._forget(key, found)
            return found.slot

    def slot(self, key: bytes) -> Slot | None:
        """Return where a block lies, or None."""
        self._check_open()
        found = self._resident.get(key)
        return found.slot if found else None

    def key_at(self, slot: Slot) -> bytes | None:
        """Return the key published in a slot, None for a slot that is free or still being written."""
        self._check_open()
        return self._key_at.get(slot.offset)

    def put(self, key: bytes, payload: Buffer, meta: BlockMeta) -> None:
        self._check_open()
        if len(payload) != meta.length:
            raise BodyMismatch(f"a payload of {len(payload)} bytes was announced as {meta.length}")
        if key in self._resident:
            return
        slot = self.allocate(meta.length)
        published = False
        try:
            self.write(slot, payload)
            published = self._publish(key, slot, meta)
        finally:
            if not published:
                self.discard(slot)

    def read_into(self, key: bytes, out: memoryview) -> BlockMeta:
        self._check_open()
        found = self._resident.get(key)
        if found is None:
            raise NotFound(f"no such block in the {self.name} tier")
        if len(out) < found.meta.length:
            raise BodyMismatch(f"a block of {found.meta.length} bytes does not fit a buffer of {len(out)}")
        target = out[: found.meta.length]
        self.read(found.slot, target)
        try:
            verify(target, found.meta, self.name)
        except CorruptBlock:
            with self._lock:
                damaged = self._resident.get(key) is found
                if damaged:
                    self._forget(key, found)
            if not damaged:
                # Deleted during the copy, and the slot written anew: a miss, not damage.
                raise NotFound(f"the block left the {self.name} tier while it was read") from None
            self.discard(found.slot)
            raise
        return found.meta

    def has(self, key: bytes) -> bool:
        self._check_open()
        return key in self._resident

    def meta(self, key: bytes) -> BlockMeta | None:
        self._check_open()
        found = self._resident.get(key)
        return found.meta if found else None

    def delete(self, key: bytes) -> bool:
        slot = self.withdraw(key)
        if slot is None:
            return False
        self.discard(slot)
        return True

    def records(self) -> Iterator[tuple[bytes, BlockMeta]]:
        with self._lock:
            self._check_open()
            snapshot = [(key, resident.meta) for key, resident in self._resident.items()]
        return iter(snapshot)

    def flush(self) -> None:
        self._check_open()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _publish(self, key: bytes, slot: Slot, meta: BlockMeta) -> bool:
        with self._lock:
            self._check_open()
            if key in self._resident:
                return False
            self._resident[key] = _Resident(slot, meta)
            self._key_at[slot.offset] = key
            self._payload_bytes += meta.length
            self._listed(key, slot, meta)
            return True

    def _forget(self, key: bytes, found: _Resident) -> None:
        del self._resident[key]
        del self._key_at[found.slot.offset]
        self._payload_bytes -= found.meta.length
        self._unlisted(key)

    def _listed(self, key: bytes, slot: Slot, meta: BlockMeta) -> None:
        """Called under the tier's lock when a block becomes readable."""

    def _unlisted(self, key: bytes) -> None:
        """Called under the tier's lock when a block is no longer readable, before its slot is given back."""

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"the {self.name} tier is closed")

    def _check_fits(self, slot: Slot, length: int) -> None:
        self._check_open()
        if length > slot.size:
            raise InvalidRequest(f"{length} bytes do not fit a slot of {slot.size}")


def _copy(target: memoryview, source: Buffer) -> None:
    # Assigning a memoryview slice holds the GIL while bytes move; numpy does not, but costs a microsecond.
    if len(target) < _GIL_FREE_COPY:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
