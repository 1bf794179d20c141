"""`ColdTier`: blocks in LMDB segments on local disk.

Two locks. `_writing` is held by the one thread that changes segments; the table's own guards who is where, for moments
only. A reader takes `_writing` only to report damage, and not before it has left its segment; so a writer never blocks
readers, and waiting for the last reader of a segment always ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, ClassVar, Literal, TypeVar, get_args

import lmdb

from tierkv.errors import (
    BodyMismatch,
    ConfigError,
    CorruptBlock,
    InvalidRequest,
    NotFound,
    StorageError,
    TierKVError,
    Unavailable,
)
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import codec_by_name
from tierkv.storage.cold import record
from tierkv.storage.cold.damage import DamageLog
from tierkv.storage.cold.datafile import Unusable
from tierkv.storage.cold.directory import StoreDirectory
from tierkv.storage.cold.pool import SegmentPool
from tierkv.storage.cold.segment import Segment
from tierkv.storage.cold.table import BlockTable
from tierkv.storage.cold.writer import SegmentWriter, Write
from tierkv.storage.container import pack, peek, unpack_into, unpack_planes_into, verify_sections
from tierkv.storage.tier import BlockMeta, Buffer, Tier, TierUsage

__all__ = ["ColdTier", "SegmentInfo", "SyncLevel"]

SyncLevel = Literal["none", "interval", "commit"]
_T = TypeVar("_T")
_PORTION_BYTES = 4 << 20
_STRUCTURAL = frozenset({"segment", "missing", "truncated"})
"""Causes of a failed read after which LMDB is not trusted with the segment before it was looked at."""
SegmentState = Literal["empty", "filling", "sealed"]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment, for people: its file name, file size in bytes, order of filling (0: empty) and live blocks."""

    name: str
    size: int
    sequence: int
    state: SegmentState
    blocks: int


class ColdTier(Tier):
    """Compressed, checksummed blocks on local disk that survive restarts.

    Parameters
    ----------
    path
        Directory of the store, created if missing; must be empty or a store already. One process at a time.
    capacity_bytes
        Most disk the directory ever takes, all overhead included. Lowering it drops the oldest segments at open.
    segment_bytes
        Size of a segment file, the unit of eviction. A block may take a quarter of it, coded. Lowered so far that a
        whole number of segments, at least four, uses the capacity up.
    codec
        Codec for new blocks whose meta names none, see `tierkv.storage.codecs`. Any block is readable, whatever this
        says.
    sync
        When written blocks go to the disk. ``none``: by `flush` and `close`, else when the kernel likes. ``interval``:
        also every `sync_interval_s` seconds and when a segment is full. ``commit``: before `put` returns. The death of
        the process alone loses nothing at any level; docs/cold-store.md says what a power loss costs.
    on_evict
        Called with the keys that made room for others or were trimmed, on the thread that did it, under no lock.
    encode_threads
        Threads that code the blocks of one `put_many`.

    Raises
    ------
    ConfigError, ForeignStore, StoreInUse, StorageError
        At construction. A damaged or strange file in the directory is no error: it is set aside, see `findings`.
    """

    name: ClassVar[str] = "cold"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        segment_bytes: int,
        codec: str = "bx1",
        sync: SyncLevel = "interval",
        sync_interval_s: float = 1.0,
        on_evict: Callable[[list[bytes]], None] | None = None,
        encode_threads: int = 1,
    ) -> None:
        if sync not in get_args(SyncLevel):
            raise ConfigError(f"unknown sync level {sync!r}", remedy="use none, interval or commit")
        if sync_interval_s <= 0 or encode_threads < 1:
            raise ConfigError("sync_interval_s must be positive and encode_threads at least 1")
        codec_by_name(codec)  # unknown ones are refused here, not at the first put
        self._capacity = capacity_bytes
        self._codec = codec
        self._encode_threads = encode_threads
        self._sync_level = sync
        self._on_evict = on_evict
        self._damage = DamageLog()
        self._writing = Lock()
        self._closed = False
        self._directory = StoreDirectory(Path(path))
        pool: SegmentPool | None = None
        try:
            pool = SegmentPool(
                self._directory, capacity_bytes, segment_bytes, self._damage, synchronous=sync == "commit"
            )
            self._table = BlockTable()
            self._writer = SegmentWriter(pool, self._table, self._damage)
            self._writer.load()
        except BaseException:
            if pool is not None:
                pool.close()
            self._directory.release()
            raise
        self._pool = pool
        self._coders = ThreadPoolExecutor(encode_threads, "tierkv-cold-encode") if encode_threads > 1 else None
        self._stop = Event()
        self._sync_due = Event()
        self._syncer = Thread(
            target=self._sync_regularly, args=(sync_interval_s,), name="tierkv-cold-sync", daemon=True
        )
        if sync == "interval":
            self._syncer.start()

    def put(self, key: bytes, payload: Buffer, meta: BlockMeta) -> None:
        (outcome,) = self.put_many([(key, payload, meta)])
        if outcome is not None:
            raise outcome

    def put_many(self, items: Sequence[tuple[bytes, Buffer, BlockMeta]]) -> list[TierKVError | None]:
        """Keep several blocks, one outcome each (None or the error). Blocks.

        A few megabytes share a transaction. Raises `Unavailable` when the tier is closed meanwhile.
        """
        self._check_open()
        outcomes: list[TierKVError | None] = [None] * len(items)
        first: dict[bytes, int] = {}
        for index, (key, payload, meta) in enumerate(items):
            if len(key) != 32:
                outcomes[index] = InvalidRequest(f"a block key has 32 bytes, not {len(key)}")
            elif memoryview(payload).nbytes != meta.length:
                outcomes[index] = BodyMismatch(
                    f"a payload of {memoryview(payload).nbytes} bytes was announced as {meta.length}"
                )
            elif key not in self._table:
                first.setdefault(key, index)
        for portion in _portions(items, list(first.values()), self._encode_threads):
            writes = []
            for index, coded in zip(portion, self._encode([items[index] for index in portion]), strict=True):
                if isinstance(coded, TierKVError):
                    outcomes[index] = coded
                else:
                    container, meta = coded
                    writes.append(Write(index, items[index][0], meta, container))
            for index, error in self._store(writes):
                outcomes[index] = error
        for index, (key, _, _) in enumerate(items):
            if outcomes[index] is None:
                outcomes[index] = outcomes[first.get(key, index)]
        return outcomes

    def has(self, key: bytes) -> bool:
        self._check_open()
        return key in self._table

    def holds(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        return self._table.holds(keys)

    def read_into(self, key: bytes, out: memoryview) -> BlockMeta:
        def decode(container: memoryview, meta: BlockMeta) -> BlockMeta:
            if len(out) < meta.length:
                raise BodyMismatch(f"a block of {meta.length} bytes does not fit a buffer of {len(out)}")
            unpack_into(container, out)
            return meta

        return self._read(key, decode)

    def read_planes(self, key: bytes, out: memoryview) -> tuple[BlockMeta, BlockLayout] | None:
        """Fill `out` with the byte planes of a block, for `tierkv.kernels.planes` to merge. Blocks.

        Returns what they are to merge to: whoever merges them verifies that. None for a block that was stored without
        planes, and where they do not fit; read it whole then. Raises `NotFound` and `CorruptBlock` as `read_into`.
        """

        def decode(container: memoryview, meta: BlockMeta) -> tuple[BlockMeta, BlockLayout] | None:
            info = unpack_planes_into(container, out)
            return None if info is None else (meta, info.layout)

        return self._read(key, decode)

    def read_container(self, key: bytes) -> tuple[bytes, BlockMeta]:
        """Return a copy of a block's container, verified short of decoding it, and its meta. Blocks.

        Raises `NotFound` and `CorruptBlock` as `read_into`.
        """

        def copy(container: memoryview, meta: BlockMeta) -> tuple[bytes, BlockMeta]:
            copied = bytes(container)
            verify_sections(copied)
            return copied, meta

        return self._read(key, copy)

    def _read(self, key: bytes, decode: Callable[[memoryview, BlockMeta], _T]) -> _T:
        """Decode a block's container; make sure that one which is damaged is never read again."""
        try:
            with self._table.reading(key) as found:
                if found is None:
                    self._check_open()
                    raise NotFound("no such block in the cold tier")
                segment, entry, meta = found
                try:
                    with segment.values() as container_at:
                        return decode(_known(container_at(record.place(entry)[1]), meta), meta)
                except (lmdb.Error, Unusable) as error:
                    cause = error.cause if isinstance(error, Unusable) else "segment"
                    raise CorruptBlock(f"a block's segment cannot be read: {error}", cause=cause) from error
        except CorruptBlock as error:
            # `found` is bound here: nothing else in there raises it.
            self._condemn(key, entry, segment.path, error)
            raise

    def meta(self, key: bytes) -> BlockMeta | None:
        self._check_open()
        return self._table.meta(key)

    def delete(self, key: bytes) -> bool:
        with self._changing():
            found = self._table.remove(key)
            if found is None:
                return False
            segment, ordinal = found
            self._writer.forget(segment, [ordinal])
        return True

    def payload_by_tenant(self) -> dict[bytes, int]:
        self._check_open()
        return self._table.payload_by_tenant()

    def trim(self, tenant: bytes, payload_bytes: int) -> int:
        """As `SupportsQuotas.trim`. Segments are gone through by age, and within one the blocks by their last use.

        Looks at every block there is once; writers wait for one segment at a time. The space comes back when the
        segments are emptied, as after `delete`. Raises `StorageError` when the disk refuses: blocks that were trimmed
        before may then come back with a restart.
        """
        self._check_open()
        if payload_bytes < 0:
            raise InvalidRequest(f"a tenant cannot be trimmed to {payload_bytes} bytes")
        trimmed = 0
        # Once, unless the blocks found were carried to another segment before it was their turn, or new ones came.
        while self._table.payload_of(tenant) > payload_bytes:
            for sequence, keys in self._table.keys_of(tenant):
                with self._changing():
                    trimmed += self._writer.trim(tenant, payload_bytes, sequence, keys)
        return trimmed

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were used: the next time their segment is emptied they are carried forward. Cheap.

        Unknown keys are ignored. Not remembered across restarts.
        """
        self._check_open()
        self._table.touch(keys)

    def records(self) -> Iterator[tuple[bytes, BlockMeta]]:
        self._check_open()
        return self._table.records()

    def usage(self) -> TierUsage:
        self._check_open()
        return TierUsage(self._capacity, self._pool.used_bytes, self._table.payload_bytes, len(self._table))

    @property
    def largest_block(self) -> int:
        return self._writer.largest_payload

    def describe(self) -> dict[str, Any]:
        """As `Tier.describe`; `stored_bytes` counts coded blocks, deleted ones in unrecycled segments included."""
        return {
            **super().describe(),
            "stored_bytes": sum(map(self._stored_bytes, list(self._pool.segments))),
            "segments": [asdict(segment) for segment in self.segments()],
            "damage": dict(self.damage),
            "findings": self.findings,
        }

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Describe the segments in use: the empty ones first, then in the order of filling."""
        self._check_open()
        filling = self._pool.filling
        return tuple(
            SegmentInfo(
                segment.path.name,
                segment.size,
                segment.sequence,
                "filling" if segment is filling else "sealed" if segment.sequence else "empty",
                segment.blocks,
            )
            for segment in list(self._pool.segments)
        )

    @property
    def damage(self) -> Mapping[str, int]:
        """Findings since the store was opened, counted by cause (listed in docs/cold-store.md)."""
        return self._damage.counts

    @property
    def findings(self) -> list[str]:
        """The latest findings in sentences, with what to do about them."""
        return self._damage.findings

    def flush(self) -> None:
        """Write everything put so far to the disk: it then survives a power loss. Blocks."""
        self._check_open()
        self._sync_unsynced()

    def close(self) -> None:
        """Flush, wait for readers, close the files and let other processes open the store. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        self._sync_due.set()
        if self._syncer.ident is not None:
            self._syncer.join()
        if self._coders is not None:
            self._coders.shutdown()
        self._table.clear(self._pool.segments)
        for segment in self._pool.segments:
            try:
                if segment.unsynced:
                    segment.sync(settle=True)
            except (OSError, lmdb.Error) as error:
                self._damage.note("sync", f"{segment.path} could not be written to disk: {error}")
        self._pool.close()
        self._directory.release()

    def _stored_bytes(self, segment: Segment) -> int:
        with self._table.inside(segment) as usable:
            try:
                return segment.stored_bytes() if usable else 0
            except (lmdb.Error, Unusable):  # damaged, which the next write to it or read from it finds
                return 0

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the cold tier is closed")

    def _store(self, writes: Sequence[Write]) -> list[tuple[int, TierKVError]]:
        with self._changing():
            failed = self._writer.store(writes)
            if self._writer.take_sealed():
                self._after_sealing()
        return failed

    def _encode(
        self, items: Sequence[tuple[bytes, Buffer, BlockMeta]]
    ) -> Iterable[tuple[Buffer, BlockMeta] | TierKVError]:
        if self._coders is None or len(items) < 2:
            return map(self._encode_one, items)
        return self._coders.map(self._encode_one, items)

    def _encode_one(self, item: tuple[bytes, Buffer, BlockMeta]) -> tuple[Buffer, BlockMeta] | TierKVError:
        """Return a block's container, and its meta with the checksum that reads of it will have."""
        _, payload, meta = item
        name = meta.codec or self._codec
        try:
            container = pack(payload, meta.layout, name, meta.checksum)
            if codec_by_name(name).lossy:
                meta = meta._replace(checksum=peek(container).payload_checksum)
            return container, meta
        except TierKVError as error:
            return error

    def _condemn(self, key: bytes, entry: bytes, where: Path, error: CorruptBlock) -> None:
        """Make sure that a block that failed verification is never read again."""
        self._damage.note(error.cause, f"a block in {where} was dropped: {error.message}")
        with self._writing:
            found = self._table.remove(key, entry) if not self._closed else None
            if found is None:
                return
            segment, ordinal = found
            try:
                if error.cause in _STRUCTURAL:
                    self._writer.examine(segment)
                if segment in self._pool.segments:
                    self._writer.forget(segment, [ordinal])
            except StorageError as refused:  # it comes back with the next start, and is found again
                self._damage.note("sync", refused.message)
            evicted = self._writer.take_evicted()
        self._report_evicted(evicted)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Be the one who changes segments and table; what that evicts is reported afterwards, under no lock."""
        evicted: list[bytes] = []
        try:
            with self._writing:
                self._check_open()
                try:
                    yield
                finally:
                    evicted = self._writer.take_evicted()
        finally:
            self._report_evicted(evicted)

    def _report_evicted(self, evicted: Sequence[bytes]) -> None:
        # Another thread may have stored one of them again meanwhile.
        gone = [key for key in evicted if key not in self._table]
        if gone and self._on_evict is not None:
            self._on_evict(gone)

    def _after_sealing(self) -> None:
        if self._sync_level == "interval":
            self._sync_due.set()
        elif self._sync_level == "commit":
            self._sync_unsynced()

    def _sync_regularly(self, interval_s: float) -> None:
        while not self._stop.is_set():
            self._sync_due.wait(interval_s)
            self._sync_due.clear()
            try:
                self._sync_unsynced()
            except StorageError as error:
                self._damage.note("sync", error.message)

    def _sync_unsynced(self) -> None:
        filling = self._pool.filling
        for segment in [segment for segment in list(self._pool.segments) if segment.unsynced]:
            with self._table.inside(segment) as usable:
                if usable:
                    try:
                        segment.sync(settle=segment is not filling)
                    except (OSError, lmdb.Error) as error:
                        raise StorageError(
                            f"{segment.path} cannot be written to disk: {error}", remedy="check the disk"
                        ) from error


def _portions(
    items: Sequence[tuple[bytes, Buffer, BlockMeta]], indices: Sequence[int], at_least: int
) -> Iterator[list[int]]:
    """Split a batch so that little of it is coded but not yet written: bounded memory, and pages that stay warm."""
    portion: list[int] = []
    nbytes = 0
    for index in indices:
        portion.append(index)
        nbytes += items[index][2].length
        if nbytes >= _PORTION_BYTES and len(portion) >= at_least:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion


def _known(container: memoryview | None, meta: BlockMeta) -> memoryview:
    """Return the container that an index record is of. Raises `CorruptBlock`."""
    if container is None:
        raise CorruptBlock("a block has an index record but no bytes", cause="missing")
    info = peek(container)
    if (info.raw_length, info.payload_checksum) != (meta.length, meta.checksum):
        raise CorruptBlock("a stored block is not the one its index record names", cause="index")
    return container
