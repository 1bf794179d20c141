"""`Area`: one tenant's blocks of one namespace, as this node knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from tierkv.errors import StorageError, Unavailable
from tierkv.storage.shared.generation import Change, Document, decide, decode, encode
from tierkv.storage.shared.known import Known
from tierkv.storage.shared.link import Link
from tierkv.storage.shared.naming import document_name

__all__ = ["Area"]

_TRIES = 20
"""Swaps that may fail because another node was first, in one go."""


class Area:
    """Keeps what a node knows of an area in step with the area's document.

    What this node does itself, a clear or a deletion, is noted here before anything else. Until the backend has it too,
    `settled` does not return: nothing of the area can be read or stored that others could not know to be gone. Nor does
    it before what was learnt on the way is saved: the backend may have lost it when this node is started again.

    Parameters
    ----------
    link
        The way to the backend.
    name
        What all names of the area begin with.
    known
        What was known before; `Known` of nothing for a new area.
    on_change
        Called when there is something new to be saved, under the area's lock.
    save
        Called when that is to be done, without the lock.
    """

    def __init__(
        self, link: Link, name: str, known: Known, *, on_change: Callable[[], None], save: Callable[[], None]
    ) -> None:
        self.name = name
        self.tenant = known.tenant
        self.namespace = known.namespace
        self._link = link
        self._on_change = on_change
        self._save = save
        self._lock = Lock()
        self._document = known.document
        self._clearing = known.clearing
        self._forgetting = dict.fromkeys(known.forgetting)
        self._cleared = known.cleared
        self._deleted = dict.fromkeys(known.deleted)
        self._told: Change | None = None

    @property
    def document_name(self) -> str:
        return document_name(self.name)

    def settled(self) -> Document:
        """Return which generation counts; ask the backend only when this node does not know or has something to say.

        Raises `Unavailable` and `StorageError`.
        """
        document = self._document
        if document is not None and not self._clearing and not self._forgetting:
            return document
        with self._lock:
            document = self._settle(self._fetch())
        self._save()
        return document

    def clear(self) -> bool:
        """Begin a new generation; say whether other nodes can know already. Works without the backend, too."""
        with self._lock:
            self._clearing = True
            self._forgetting.clear()
            self._on_change()
        return self._try_to_settle()

    def forget(self, keys: Sequence[bytes]) -> bool:
        """Note that blocks are deleted; say whether other nodes can know already. Works without the backend, too."""
        if not keys:
            return True
        with self._lock:
            if not self._clearing:
                self._forgetting.update(dict.fromkeys(keys))
                self._on_change()
        return self._try_to_settle()

    def absorb(self, found: bytes | None) -> None:
        """Take over what the backend has, and put there what it has to have. Raises as `settled`."""
        with self._lock:
            self._settle(found)

    def take_change(self) -> Change | None:
        """Return what others did and nobody here was told of. It is remembered until the next call, or `confirm`."""
        with self._lock:
            self._confirm()
            if not self._cleared and not self._deleted:
                return None
            self._told = Change(self.tenant, self.namespace, self._cleared, tuple(self._deleted))
            self._cleared = False
            self._deleted.clear()
            return self._told

    def confirm(self) -> None:
        """Note that what `take_change` returned last has been seen to."""
        with self._lock:
            self._confirm()

    def known(self) -> Known:
        """Return all there is to remember."""
        with self._lock:
            told = self._told
            return Known(
                self.tenant,
                self.namespace,
                self._document,
                self._clearing,
                tuple(self._forgetting),
                self._cleared or (told is not None and told.cleared),
                (told.deleted if told is not None else ()) + tuple(self._deleted),
            )

    def _confirm(self) -> None:
        if self._told is not None:
            self._told = None
            self._on_change()

    def _fetch(self) -> bytes | None:
        return self._link.get_small([self.document_name])[0]

    def _try_to_settle(self) -> bool:
        try:
            self.settled()
            return True
        except (Unavailable, StorageError):
            return False
        finally:
            self._save()

    def _settle(self, raw: bytes | None) -> Document:
        for _ in range(_TRIES):
            found = None if raw is None else decode(raw)
            others, wanted = decide(
                self._document,
                found,
                damaged=raw is not None and found is None,
                clear=self._clearing,
                forget=tuple(self._forgetting),
            )
            if wanted == found or self._link.swap(self.document_name, raw, encode(wanted)):
                self._adopt(others, wanted)
                return wanted
            raw = self._fetch()
        raise Unavailable(
            "other nodes keep changing an area of the shared tier", remedy="it is tried again with the next call"
        )

    def _adopt(self, others: Document, wanted: Document) -> None:
        known = self._document
        if known == wanted and not self._clearing and not self._forgetting:
            return
        if known is None:
            # What this node has from elsewhere may be older than what happened to the area before it came.
            self._cleared = bool(others.ancestors or others.deletions)
        elif others.continues(known):
            self._deleted.update(dict.fromkeys(one.key for one in others.deletions[len(known.deletions) :]))
        else:
            self._cleared = True
            self._deleted = dict.fromkeys(one.key for one in others.deletions)
        self._document = wanted
        self._clearing = False
        self._forgetting.clear()
        self._on_change()
