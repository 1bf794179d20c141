"""Sessions: what a conversation says about its blocks, and what follows for the order of eviction.

A block used by one session alone is *private* to it. When the session ends, its private blocks are the next to leave
memory; shared ones stay where policy has them. Hints are only ever taken at their word, never guessed: false ones cost
more than missing ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.core.index import Entry
from tierkv.errors import InvalidRequest
from tierkv.keys import SESSION_CHARACTERS

__all__ = ["SHARED", "Session", "SessionTable"]

SHARED = object()
"""Owner of blocks that several sessions, or requests without one, have used."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation of a tenant in a namespace, and the chain it used last.

    Attributes
    ----------
    resumes
        When the session said it would go on (monotonic seconds); 0 when it is not paused.
    """

    tenant: bytes
    namespace: str
    name: str
    hashes: tuple[bytes, ...] = ()
    resumes: float = 0.0


class SessionTable:
    """The sessions heard of last. All access happens under the engine's lock.

    Parameters
    ----------
    most
        How many are remembered; whoever was silent longest is forgotten first, as if it had never been named. May be
        changed at any time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._sessions: OrderedDict[tuple[bytes, str, str], Session] = OrderedDict()

    @staticmethod
    def check(name: str) -> None:
        """Raise `InvalidRequest` for a name that no session can have."""
        if len(name) > SESSION_CHARACTERS:
            raise InvalidRequest(f"a session's name has at most {SESSION_CHARACTERS} characters")

    def use(self, tenant: bytes, namespace: str, name: str, hashes: tuple[bytes, ...]) -> Session:
        """Note that a session asks for a chain."""
        key = (tenant, namespace, name)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(tenant, namespace, name)
            while len(self._sessions) > self.most:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(key)
        session.hashes = hashes
        session.resumes = 0.0
        return session

    def find(self, tenant: bytes, namespace: str, name: str) -> Session | None:
        """Return a session that is remembered."""
        return self._sessions.get((tenant, namespace, name))

    def end(self, session: Session) -> None:
        """Forget a session."""
        self._sessions.pop((session.tenant, session.namespace, session.name), None)

    def __len__(self) -> int:
        return len(self._sessions)

    @staticmethod
    def own(session: Session | None, entries: Iterable[Entry]) -> None:
        """Note that a session (or a request without one) uses blocks."""
        for entry in entries:
            if entry.owner is not session or session is None:
                entry.owner = session if session is not None and entry.owner is None else SHARED
