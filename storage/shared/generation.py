"""Generations: how a clear and a deletion reach every node, without a node talking to another.

Each area has one small document in the backend. It says which generation of blocks counts, by a random token that is
part of the blocks' names, which generations came before, and which blocks of this one were deleted, in order. Who
clears the area puts the document of a new generation in its place; the blocks of the old one are then out of reach for
everybody who has read it, whatever a node that has not goes on putting there. Who deletes blocks appends to the list,
each with a random mark; a block bears the mark of the last deletion its writer knew of, so one that was put by a node
that did not know of its deletion is not served either.

A backend may lose the document, or go back to an older one, and nodes go on from what each of them knows. A document
continues another when it is of the same generation and its list begins with the other's, marks included: two nodes that
delete the same block make two histories. It follows another when that one's generation came before. One that does
neither comes from a history this node has not seen, and of which it cannot tell what was cleared and deleted there, nor
others what was cleared and deleted here; then neither is kept, and a generation that follows both begins.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgpack

from tierkv.storage.tier import checksum

__all__ = ["MOST_ANCESTORS", "MOST_DELETED", "Change", "Deletion", "Document", "decide", "decode", "encode"]

MOST_DELETED = 1024
"""Deletions a document lists; one more begins a new generation."""
MOST_ANCESTORS = 64
"""Generations a document remembers; who was away for more takes its history for another, and clears once more."""
_VERSION = 2
_TOKEN_BYTES = 8
_DELETION = struct.Struct("<32sQ")


class Deletion(NamedTuple):
    """One deletion of one block: the block's key, and 64 random bits by which to tell it from another of the same."""

    key: bytes
    mark: int


@dataclass(frozen=True, slots=True)
class Document:
    """What the nodes agree on about one area.

    Attributes
    ----------
    token
        Which generation counts: 8 random bytes.
    ancestors
        Tokens of the generations before, the latest last.
    deletions
        What was deleted in this generation, the first first.
    """

    token: bytes
    ancestors: tuple[bytes, ...] = ()
    deletions: tuple[Deletion, ...] = ()
    _last: Mapping[bytes, int] = field(init=False, repr=False, compare=False)
    _known: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """By key the place of its last deletion, from 1, and by mark how many deletions who bears it knew of."""
        places = range(1, len(self.deletions) + 1)
        object.__setattr__(self, "_last", {one.key: at for one, at in zip(self.deletions, places, strict=True)})
        object.__setattr__(
            self, "_known", {0: 0, **{one.mark: at for one, at in zip(self.deletions, places, strict=True)}}
        )

    @property
    def generation(self) -> str:
        """The generation as it stands in names."""
        return self.token.hex()

    @property
    def mark(self) -> int:
        """What a block bears that is put by who knows this document: the mark of the last deletion, 0 for none."""
        return self.deletions[-1].mark if self.deletions else 0

    def lists(self, key: bytes) -> bool:
        """Whether a block was ever deleted in this generation: it has to be looked at then."""
        return key in self._last

    def deletes(self, key: bytes, mark: int) -> bool:
        """Whether a block with this mark is gone: deleted after what its writer knew, or perhaps so."""
        known = self._known.get(mark)
        return key in self._last and (known is None or known < self._last[key])

    def continues(self, other: Document) -> bool:
        """Whether this is the other document, or what became of it by deletions."""
        return (self.token, self.deletions[: len(other.deletions)]) == (other.token, other.deletions)

    def follows(self, other: Document) -> bool:
        """Whether the other document's generation came before this one's."""
        return other.token in self.ancestors

    def with_deletions(self, keys: Sequence[bytes]) -> Document:
        """Return what becomes of it when blocks are deleted."""
        return replace(self, deletions=self.deletions + tuple(Deletion(key, secrets.randbits(64)) for key in keys))


@dataclass(frozen=True, slots=True)
class Change:
    """What other nodes did to an area.

    Attributes
    ----------
    tenant, namespace
        Whose blocks: `BlockMeta.tenant` and `BlockMeta.namespace`.
    cleared
        Whether all blocks there were are gone. It may be told of a clear twice, never not at all.
    deleted
        Keys of blocks that are gone.
    """

    tenant: bytes
    namespace: bytes
    cleared: bool
    deleted: tuple[bytes, ...]


def after(*others: Document) -> Document:
    """Return the first document of a generation that follows others, if there are any."""
    older = dict.fromkeys(token for other in others for token in other.ancestors)
    older.update(dict.fromkeys(other.token for other in others))
    return Document(secrets.token_bytes(_TOKEN_BYTES), tuple(older)[-MOST_ANCESTORS:])


def decide(
    known: Document | None, found: Document | None, *, damaged: bool, clear: bool, forget: Sequence[bytes]
) -> tuple[Document, Document]:
    """Decide what the document has to be, given what this node knows and what the backend has.

    Parameters
    ----------
    known
        What this node knew; None for an area it meets for the first time.
    found
        What the backend has; None for nothing, or for something that is no document (`damaged`).
    clear, forget
        What this node wants to do itself.

    Returns
    -------
    tuple of Document
        What others have made of it, and what it has to be with this node's own changes: put that in its place unless
        it is what was found.
    """
    if known is None:
        others = after() if found is None else found
    elif found is None:
        others = after(known) if damaged else known
    elif found.continues(known) or found.follows(known):
        others = found
    else:
        others = after(known, found)
    if clear or len(others.deletions) + len(forget) > MOST_DELETED:
        return others, after(others)
    return others, others.with_deletions(forget) if forget else others


def encode(document: Document) -> bytes:
    """Return a document as it is stored."""
    deletions = b"".join(_DELETION.pack(*deletion) for deletion in document.deletions)
    body: bytes = msgpack.packb([_VERSION, document.token, b"".join(document.ancestors), deletions])
    return checksum(body).to_bytes(8, "little") + body


def decode(data: bytes) -> Document | None:
    """Inverse of `encode`; None for bytes that no version of it made."""
    if len(data) < 8 or checksum(data[8:]) != int.from_bytes(data[:8], "little"):
        return None
    try:
        version, token, older, deletions = msgpack.unpackb(data[8:])
        if version != _VERSION or len(token) != _TOKEN_BYTES or len(older) % _TOKEN_BYTES:
            return None
        ancestors = tuple(older[at : at + _TOKEN_BYTES] for at in range(0, len(older), _TOKEN_BYTES))
        return Document(token, ancestors, tuple(map(Deletion._make, _DELETION.iter_unpack(deletions))))
    except (ValueError, TypeError, struct.error, msgpack.UnpackException):
        return None
