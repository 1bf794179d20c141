"""Generations: how a clear and a deletion reach every node, without a node talking to another.

Each area has one small document in the backend. It says which generation of blocks counts, by a count and a random
token, both part of the blocks' names, and which blocks of that generation were deleted, in order. Who clears the area
puts a document with the next count in its place; the blocks of the old generation are then out of reach for everybody
who has read it, whatever a node that has not goes on putting there. Who deletes blocks appends to the list; a block
says in its envelope how many deletions its writer knew of, so one that was put by a node that did not know of its
deletion is not served either.

A backend may lose the document, or go back to an older one. A document continues another when it is of the same
generation and its list begins with the other's. One that neither continues what a node knows nor has a higher count
comes from a history this node has not seen, with clears of which it knows nothing; then neither is kept, and a
generation above both begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgpack

from tierkv.storage.tier import checksum

__all__ = ["MOST_DELETED", "Change", "Document", "decide", "decode", "encode"]

MOST_DELETED = 1024
"""Deletions a document lists; one more begins a new generation."""
_VERSION = 1
_TOKEN_BYTES = 8
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Document:
    """What the nodes agree on about one area.

    Attributes
    ----------
    count, token
        Which generation counts: how many there were, and 8 random bytes.
    deleted
        Keys deleted in this generation, the first deletion first.
    deleted_at
        Key -> how many deletions there were with its last one: a block of a lower edition is gone.
    """

    count: int
    token: bytes
    deleted: tuple[bytes, ...] = ()
    deleted_at: Mapping[bytes, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "deleted_at", {key: at for at, key in enumerate(self.deleted, 1)})

    @property
    def generation(self) -> str:
        """The generation as it stands in names."""
        return f"{self.count}-{self.token.hex()}"

    @property
    def edition(self) -> int:
        """How many deletions there were in this generation."""
        return len(self.deleted)

    def continues(self, other: Document) -> bool:
        """Whether this is the other document, or what became of it by deletions."""
        return (self.count, self.token, self.deleted[: other.edition]) == (other.count, other.token, other.deleted)


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


def after(count: int) -> Document:
    """Return the first document of a generation that follows one with this count."""
    return Document(count + 1, secrets.token_bytes(_TOKEN_BYTES))


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
    if found is None:
        others = known if known is not None and not damaged else after(0 if known is None else known.count)
    elif known is None or found.continues(known) or found.count > known.count:
        others = found
    else:
        others = after(known.count)
    if clear or others.edition + len(forget) > MOST_DELETED:
        return others, after(others.count)
    return others, replace(others, deleted=others.deleted + tuple(forget)) if forget else others


def encode(document: Document) -> bytes:
    """Return a document as it is stored."""
    body: bytes = msgpack.packb([_VERSION, document.count, document.token, b"".join(document.deleted)])
    return checksum(body).to_bytes(8, "little") + body


def decode(data: bytes) -> Document | None:
    """Inverse of `encode`; None for bytes that no version of it made."""
    if len(data) < 8 or checksum(data[8:]) != int.from_bytes(data[:8], "little"):
        return None
    try:
        version, count, token, deleted = msgpack.unpackb(data[8:])
        if version != _VERSION or len(token) != _TOKEN_BYTES or len(deleted) % _KEY_BYTES:
            return None
        keys = tuple(deleted[at : at + _KEY_BYTES] for at in range(0, len(deleted), _KEY_BYTES))
        return Document(int(count), bytes(token), keys)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
