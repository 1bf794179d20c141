"""`SharedTier`: one area of a `SharedStore`, as a tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar

from tierkv.errors import BlockTooLarge, BodyMismatch, CorruptBlock, InvalidRequest, NotFound, SpecMismatch, TierKVError
from tierkv.storage.container import pack_parts, peek, unpack_into
from tierkv.storage.shared.areas import Area
from tierkv.storage.shared.envelope import ENVELOPE_BYTES, Envelope, read_header, seal, unseal
from tierkv.storage.shared.generation import Document
from tierkv.storage.shared.link import Link
from tierkv.storage.shared.naming import block_name, block_prefix, claim_name, key_of_name
from tierkv.storage.shared.transfers import Done, read_all, write_all
from tierkv.storage.tier import BlockMeta, Buffer, Tier, TierUsage

__all__ = ["SharedTier"]

_KEY_BYTES = 32
_HEADS_AT_ONCE = 64


class SharedTier(Tier):
    """One tenant's blocks of one namespace, shared by all nodes. Made by `SharedStore.area`.

    A block is looked up in the generation of the area that this node knows to count. Every method but `close` and
    `describe` raises `Unavailable` when the engine cannot be reached or does not answer in time, and `StorageError`
    when it fails; none waits longer than the store's timeouts allow.
    """

    name: ClassVar[str] = "shared"

    def __init__(
        self,
        link: Link,
        area: Area,
        *,
        codec: str,
        coders: Executor | None,
        owner: str,
    ) -> None:
        self._link = link
        self._area = area
        self._codec = codec
        self._coders = coders
        self._owner = owner
        self._damage: Counter[str] = Counter()

    @property
    def tenant(self) -> bytes:
        """Whose blocks these are, as in `BlockMeta`."""
        return self._area.tenant

    @property
    def namespace(self) -> bytes:
        """Which namespace they are of, as in `BlockMeta`."""
        return self._area.namespace

    @property
    def damage(self) -> Mapping[str, int]:
        """Blocks that failed verification and were removed, by cause."""
        return dict(self._damage)

    def put(self, key: bytes, payload: Buffer, meta: BlockMeta) -> None:
        (outcome,) = self.put_many([(key, payload, meta)])
        if outcome is not None:
            raise outcome

    def put_many(
        self,
        items: Sequence[tuple[bytes, Buffer, BlockMeta]],
        done: Done[None] | None = None,
        *,
        missing: bool = False,
    ) -> list[TierKVError | None]:
        """Keep several blocks, one outcome each. Asks in one round trip which are there already. Blocks.

        Blocks are coded while others are under way. `done` is called with the index and the outcome of each as soon as
        it is known, on the calling thread. `missing`: the caller has just asked for them, so this does not; a
        block that another node has put meanwhile is put in its place.
        """

        def code(item: tuple[bytes, Buffer, BlockMeta]) -> tuple[BlockMeta, Sequence[Buffer]]:
            _, payload, meta = item
            parts = pack_parts(payload, meta.layout, meta.codec or self._codec, meta.checksum)
            return meta._replace(checksum=peek(parts[0]).payload_checksum), parts

        lengths = [memoryview(payload).nbytes for _, payload, _ in items]
        wrong: list[TierKVError | None] = [
            BodyMismatch(f"a payload of {length} bytes was announced as {meta.length}")
            if length != meta.length
            else None
            for length, (_, _, meta) in zip(lengths, items, strict=True)
        ]
        return self._put(items, wrong, code, done, missing)

    def put_container(self, key: bytes, container: Buffer, meta: BlockMeta) -> None:
        """Keep a block that was coded before, by `tierkv.storage.container.pack`, as it is. Blocks; raises as `put`.

        Raises `CorruptBlock` for bytes that are not the whole container of the block that `meta` describes.
        """
        (outcome,) = self.put_containers([(key, container, meta)])
        if outcome is not None:
            raise outcome

    def put_containers(
        self,
        items: Sequence[tuple[bytes, Buffer, BlockMeta]],
        done: Done[None] | None = None,
        *,
        missing: bool = False,
    ) -> list[TierKVError | None]:
        """As `put_many`, for blocks that were coded before."""

        def take(item: tuple[bytes, Buffer, BlockMeta]) -> tuple[BlockMeta, Sequence[Buffer]]:
            _, container, meta = item
            info, nbytes = peek(container), memoryview(container).nbytes
            found = (info.raw_length, info.payload_checksum, info.container_length)
            if found != (meta.length, meta.checksum, nbytes):
                raise CorruptBlock("a container is not that of the block it was announced as", cause="header")
            return meta, [container]

        return self._put(items, [None] * len(items), take, done, missing)

    def read_into(self, key: bytes, out: memoryview) -> BlockMeta:
        (outcome,) = self.read_many([(key, out)])
        if isinstance(outcome, TierKVError):
            raise outcome
        return outcome

    def read_many(
        self, items: Sequence[tuple[bytes, memoryview]], done: Done[BlockMeta] | None = None
    ) -> list[BlockMeta | TierKVError]:
        """Read several blocks, one outcome each: as `read_into` returns or raises. Blocks.

        Blocks are decoded while others are under way. `done` is called with the index and the outcome of each as soon
        as it is known, on the calling thread.
        """
        document = self._area.settled()

        def decode(index: int, data: Buffer | None) -> BlockMeta:
            key, out = items[index]
            envelope, container = self._open(document, key, data)
            if len(out) < envelope.meta.length:
                raise BodyMismatch(f"a block of {envelope.meta.length} bytes does not fit a buffer of {len(out)}")
            unpack_into(container, out)
            return envelope.meta

        names = [self._name(document, key) for key, _ in items]
        outcomes = read_all(self._link, names, decode, self._coders, done)
        self._remove_damaged(names, outcomes)
        return outcomes

    def read_container(self, key: bytes) -> tuple[memoryview, BlockMeta]:
        """Return a block's container, not decoded, and its meta. Blocks; raises as `read_into`.

        Its header is verified, its sections are not: `tierkv.storage.container.unpack_into` does that.
        """
        document = self._area.settled()

        def keep(_: int, data: Buffer | None) -> tuple[memoryview, BlockMeta]:
            envelope, container = self._open(document, key, data)
            return container, envelope.meta

        names = [self._name(document, key)]
        (outcome,) = outcomes = read_all(self._link, names, keep, None, None)
        self._remove_damaged(names, outcomes)
        if isinstance(outcome, TierKVError):
            raise outcome
        return outcome

    def meta(self, key: bytes) -> BlockMeta | None:
        document = self._area.settled()
        (head,) = self._heads(document, [key])
        return None if head is None else head.meta

    def has(self, key: bytes) -> bool:
        return self.held([key])[0]

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which blocks are there. One round trip, or several at once for more than the backend's `probe_width`."""
        return self._held(self._area.settled(), keys)

    def holds(self, keys: Sequence[bytes]) -> int:
        """As `Tier.holds`. One round trip for at most `probe_width` keys.

        For more of them takes it that a block is there when a later one is, and then needs a round trip for each power
        of `probe_width` that they are more.
        """
        document = self._area.settled()
        width = self._link.backend.probe_width
        first, end = 0, len(keys)  # all before `first` are there, `end` is the first that is not, or the end
        while end - first > width:
            step = -(-(end - first) // (width + 1))
            places = range(first + step - 1, end, step)[:width]
            there = self._held(document, [keys[place] for place in places])
            gap = there.index(False) if False in there else len(there)
            if gap < len(there):
                end = places[gap]
            if gap:
                first = places[gap - 1] + 1
        there = self._held(document, keys[first:end])
        return first + (there.index(False) if False in there else len(there))

    def delete(self, key: bytes) -> bool:
        """Remove a block; say whether it was there. Another node may put it back: `forget` is for good."""
        document = self._area.settled()
        if not self._held(document, [key])[0]:
            return False
        return self._link.delete([self._name(document, key)]) > 0

    def forget(self, keys: Sequence[bytes]) -> bool:
        """Delete blocks on all nodes: see `Tier.delete`, and `SharedStore.poll` for how the others are told.

        Never raises for an engine that cannot be reached: it is then done when it can, and until then nothing of the
        area can be read or put by this node. Returns whether it is done.
        """
        for key in keys:
            _check_key(key)
        return self._change(lambda: self._area.forget(keys), keys)

    def clear(self) -> bool:
        """Delete all blocks of the area on all nodes. As `forget`; they are out of reach at once."""
        return self._change(self._area.clear, ())

    def claim(self, key: bytes, ttl_s: float) -> bool | None:
        """Say that this node is about to make a block; False while another node is, for as long as it said.

        None when the backend has no claims: nobody can know then.
        """
        _check_key(key)
        if not self._link.claims:
            return None
        return self._link.claim(claim_name(self._area.name, key), self._owner, ttl_s)

    def unclaim(self, key: bytes) -> None:
        """Give a claim up, if it is still this node's."""
        _check_key(key)
        if self._link.claims:
            self._link.unclaim(claim_name(self._area.name, key), self._owner)

    def records(self) -> Iterator[tuple[bytes, BlockMeta]]:
        """As `Tier.records`, by depth. For inspection: lists names in the backend and reads each block's header."""
        return iter([(head.key, head.meta) for head in self._listed()])

    def usage(self) -> TierUsage:
        """Report the capacity of the whole engine and what is used of it, as of the last look.

        Both are 0 when it has no bound or was not reached yet. Blocks are not counted: nobody knows how many there
        are; `survey` finds out.
        """
        self._link.check_open()
        capacity = self._link.capacity
        return TierUsage(capacity.capacity_bytes, capacity.used_bytes, 0, 0)

    def survey(self) -> TierUsage:
        """Count the blocks of this area, as `records` lists them; used are the bytes they take in the backend."""
        heads = self._listed()
        used = sum(ENVELOPE_BYTES + head.container_bytes for head in heads)
        return TierUsage(self._link.capacity.capacity_bytes, used, sum(head.meta.length for head in heads), len(heads))

    @property
    def largest_block(self) -> int:
        largest = self._link.backend.largest_value - (1 << 20)  # whatever a codec and the headers add
        capacity = self._link.capacity.capacity_bytes
        return min(largest, capacity) if capacity else largest

    def describe(self) -> dict[str, Any]:
        capacity = self._link.capacity
        return {
            **asdict(TierUsage(capacity.capacity_bytes, capacity.used_bytes, 0, 0)),
            "damage": self.damage,
        }

    def flush(self) -> None:
        self._link.check_open()

    def close(self) -> None:
        """Do nothing: an area is open for as long as its store."""

    def _name(self, document: Document, key: bytes) -> str:
        _check_key(key)
        return block_name(self._area.name, document.generation, key)

    def _open(self, document: Document, key: bytes, data: Buffer | None) -> tuple[Envelope, memoryview]:
        if data is None:
            raise NotFound("no such block in the shared tier")
        envelope, container = unseal(data, key, self._area.tenant, self._area.namespace)
        if document.deletes(key, envelope.mark):
            raise NotFound("the block was deleted from the shared tier")
        return envelope, container

    def _held(self, document: Document, keys: Sequence[bytes]) -> list[bool]:
        there = self._link.present([self._name(document, key) for key in keys])
        # What lies there of a deleted block may be what was deleted, put by a node that did not know.
        doubtful = [at for at, key in enumerate(keys) if there[at] and document.lists(key)]
        if doubtful:
            for at, head in zip(doubtful, self._heads(document, [keys[at] for at in doubtful]), strict=True):
                there[at] = head is not None
        return there

    def _heads(self, document: Document, keys: Sequence[bytes]) -> list[Envelope | None]:
        """Return the headers of blocks that are there; remove those that are damaged."""
        names = [self._name(document, key) for key in keys]
        found: list[Envelope | None] = []
        damaged: list[TierKVError | None] = []
        for key, head in zip(keys, self._link.heads(names, ENVELOPE_BYTES), strict=True):
            envelope, error = None, None
            if head is not None:
                try:
                    envelope = read_header(head, key, self._area.tenant, self._area.namespace)
                except CorruptBlock as corrupt:
                    error = corrupt
            if envelope is not None and document.deletes(key, envelope.mark):
                envelope = None
            found.append(envelope)
            damaged.append(error)
        self._remove_damaged(names, damaged)
        return found

    def _listed(self) -> list[Envelope]:
        document = self._area.settled()
        names = self._link.names(block_prefix(self._area.name, document.generation))
        keys = [key for name in names if (key := key_of_name(name)) is not None]
        heads: list[Envelope] = []
        for at in range(0, len(keys), _HEADS_AT_ONCE):
            heads += [head for head in self._heads(document, keys[at : at + _HEADS_AT_ONCE]) if head is not None]
        return sorted(heads, key=lambda head: head.meta.depth)

    def _put(
        self,
        items: Sequence[tuple[bytes, Buffer, BlockMeta]],
        wrong: Sequence[TierKVError | None],
        code: Callable[[tuple[bytes, Buffer, BlockMeta]], tuple[BlockMeta, Sequence[Buffer]]],
        done: Done[None] | None,
        missing: bool,
    ) -> list[TierKVError | None]:
        if not items:
            return []
        document = self._area.settled()
        there = [False] * len(items) if missing else self._held(document, [key for key, _, _ in items])
        refused = [error or self._refusal(meta) for error, (_, _, meta) in zip(wrong, items, strict=True)]
        first: dict[bytes, int] = {}
        for index, (key, _, _) in enumerate(items):
            if refused[index] is None and not there[index]:
                first.setdefault(key, index)

        def value(index: int) -> bytes:
            key = items[index][0]
            meta, parts = code(items[index])
            size = sum(memoryview(part).nbytes for part in parts)
            # One copy, into what every client takes without another.
            return b"".join((seal(key, meta, document.mark, size), *parts))

        wanted = [(index, self._name(document, key)) for key, index in first.items()]
        sent = write_all(self._link, wanted, value, self._coders, done)
        outcomes: list[TierKVError | None] = []
        for index, (key, _, _) in enumerate(items):
            outcome = refused[index] if refused[index] is not None else sent.get(first.get(key, -1))
            outcomes.append(outcome)
            if done is not None and index not in sent:
                done(index, outcome)
        return outcomes

    def _refusal(self, meta: BlockMeta) -> TierKVError | None:
        if (meta.tenant, meta.namespace) != (self._area.tenant, self._area.namespace):
            return SpecMismatch(
                "a block of another tenant or namespace was put into an area of the shared tier",
                remedy="put it into its own: SharedStore.area",
            )
        if meta.length > self.largest_block:
            return BlockTooLarge(f"a block of {meta.length} bytes can never fit the shared tier")
        return None

    def _change(self, change: Callable[[], bool], keys: Sequence[bytes]) -> bool:
        if keys:
            # Before the list is longer: that may need room. What cannot be deleted, or is put again, is on the list.
            with suppress(TierKVError):
                document = self._area.settled()
                self._link.delete([self._name(document, key) for key in keys])
        return change()

    def _remove_damaged(self, names: Sequence[str], outcomes: Sequence[object]) -> None:
        damaged = [(name, error.cause) for name, error in zip(names, outcomes, strict=True)
                   if isinstance(error, CorruptBlock)]  # fmt: skip
        if damaged:
            self._damage.update(cause for _, cause in damaged)
            with suppress(TierKVError):  # else the next reader finds it again
                self._link.delete([name for name, _ in damaged])


def _check_key(key: bytes) -> None:
    if len(key) != _KEY_BYTES:
        raise InvalidRequest(f"a block key has {_KEY_BYTES} bytes, not {len(key)}")
