"""Everything an engine has to do with the shared tier, in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal

from tierkv.core.chain import ChainView
from tierkv.core.index import Entry
from tierkv.core.sharing.counts import SharedCounts
from tierkv.core.sharing.following import Claim, Follower
from tierkv.core.sharing.knowledge import Knowledge
from tierkv.core.sharing.probing import Prober
from tierkv.core.sharing.uploading import Uploader
from tierkv.core.state import State
from tierkv.errors import NotFound, TierKVError
from tierkv.storage.tier import BlockMeta

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore

__all__ = ["Sharing", "SharingTerms", "WritePolicy"]

log = logging.getLogger(__name__)

WritePolicy = Literal["all", "demotion", "hits"]
Removed = Callable[[bytes, bytes, Sequence[bytes] | None], int]


@dataclass(frozen=True, slots=True)
class SharingTerms:
    """How a machine takes part.

    Attributes
    ----------
    write
        Which blocks it offers: ``all`` as soon as they are published, those that reach the cold tier (``demotion``),
        or those used `hits` times (``hits``).
    bytes_per_s
        Most bytes of blocks it writes a second; None: no bound.
    probe_s
        Longest time that a request waits for an answer what is there, in seconds.
    sync_s
        Seconds from one look at what others have cleared or deleted to the next.
    """

    write: WritePolicy = "all"
    hits: int = 2
    bytes_per_s: float | None = None
    probe_s: float = 0.2
    sync_s: float = 2.0


class Sharing:
    """The shared tier as an engine uses it.

    Methods that say so are called with the engine's lock held, and return at once.

    Parameters
    ----------
    removed
        Removes from this machine what another one has cleared or deleted: called with a tenant's id, a namespace's
        fingerprint, and the keys, None for all of them.
    """

    def __init__(
        self, state: State, store: SharedStore, knowledge: Knowledge, terms: SharingTerms, removed: Removed
    ) -> None:
        self._state = state
        self._store = store
        self._terms = terms
        self._removed = removed
        self.knowledge = knowledge
        self.counts = SharedCounts()
        self._prober = Prober(store, knowledge, state.lock)
        self._uploader = Uploader(state, store, knowledge, self.counts, terms.bytes_per_s)
        self._follower = Follower(store, self._prober, self.counts, state.lock)
        self._areas: set[tuple[bytes, bytes]] = set()
        self._stop, self._look_now = Event(), Event()
        self._sync()  # what happened while this machine was away
        self._syncer = Thread(target=self._sync_regularly, name="tierkv-shared-sync", daemon=True)
        self._syncer.start()

    @property
    def probe_s(self) -> float:
        """Longest time that a request waits for an answer what is there, in seconds."""
        return self._terms.probe_s

    @property
    def outages(self) -> int:
        """How often the tier was found not to answer."""
        return self._store.health.opened

    def seen(self, tenant: bytes, namespace: bytes) -> None:
        """Note that a tenant uses a namespace, with the lock held: what others clear of it concerns this machine.

        It is looked at, and written down, at once: a machine that dies must know afterwards what it missed.
        """
        if (tenant, namespace) not in self._areas:
            self._areas.add((tenant, namespace))
            self._store.area(tenant, namespace)
            self._look_now.set()

    def ask(self, chain: ChainView, start: int, stop: int) -> Future[bool] | None:
        """See `Prober.ask`."""
        return self._prober.ask(chain, start, stop)

    def published(self, entries: Iterable[Entry]) -> None:
        """Blocks were published on this machine (with the lock held)."""
        if self._terms.write == "all":
            self._uploader.offer(entries)

    def demoted(self, entries: Iterable[Entry]) -> None:
        """Blocks have reached the cold tier (with the lock held)."""
        if self._terms.write == "demotion":
            self._uploader.offer(entries)

    def used(self, entries: Iterable[Entry]) -> None:
        """A request used blocks (with the lock held)."""
        if self._terms.write == "hits":
            self._uploader.offer(entry for entry in entries if entry.uses == self._terms.hits)

    def read(
        self, items: Sequence[tuple[bytes, BlockMeta, memoryview]], done: Callable[[int, BlockMeta | TierKVError], None]
    ) -> None:
        """Fill buffers with verified blocks of one tenant and namespace. Blocks.

        Calls `done` for each, on this thread, as soon as it is there or has failed: with its position among `items`.
        """
        meta = items[0][1]
        area = self._store.area(meta.tenant, meta.namespace)

        def one(position: int, outcome: BlockMeta | TierKVError) -> None:
            wanted = items[position][1]
            if isinstance(outcome, BlockMeta) and outcome.length != wanted.length:
                outcome = NotFound("the shared tier holds a block of another size")
            done(position, outcome)

        area.read_many([(key, out) for key, _, out in items], one)

    @property
    def single_flight(self) -> bool:
        """Whether it pays to wait for another machine that computes: its blocks come as soon as they are published."""
        return self._terms.write == "all" and self._store.available

    def claim(self, chain: ChainView, start: int, stop: int, ttl_s: float) -> Future[Claim | None]:
        """See `Follower.claim`."""
        return self._follower.claim(chain, start, stop, ttl_s)

    def progressed(self, claim: Claim, key: bytes) -> None:
        """See `Follower.progressed`."""
        self._follower.progressed(claim, key)

    def ended(self, claim: Claim) -> None:
        """Give a claim up once what was computed under it can be had elsewhere (with the lock held)."""
        self._follower.progressed(claim, claim.key)
        self._uploader.then(lambda: self._follower.ended(claim))

    def follow(self, chain: ChainView, start: int, stop: int, claim_s: float, done: Future[None]) -> None:
        """See `Follower.follow`."""
        self._follower.follow(chain, start, stop, claim_s, done)

    def forget(self, done: Future[None]) -> None:
        """See `Follower.forget`."""
        self._follower.forget(done)

    def clear(self, tenant: bytes, namespace: bytes) -> None:
        """Make all machines forget a tenant's blocks of a namespace. Blocks; one that is away learns of it later."""
        with self._state.lock:
            self.knowledge.forget_all(tenant, namespace)
        self._tell(lambda: self._store.area(tenant, namespace).clear())

    def delete(self, tenant: bytes, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Make all machines forget blocks. Blocks, as `clear`."""
        with self._state.lock:
            self.knowledge.forget(keys)
        self._tell(lambda: self._store.area(tenant, namespace).forget(keys))

    def flush(self, wait_s: float) -> bool:
        """Wait until what was offered so far is written, or given up; say whether it was in time. Blocks."""
        return self._uploader.drain(wait_s)

    def describe(self) -> dict[str, Any]:
        """Return the tier's state and counters as plain data, see docs/metrics.md."""
        with self._state.lock:
            known, waiting, counts = len(self.knowledge), self._uploader.waiting(), self.counts.to_dict()
        return {**self._store.describe(), "known_blocks": known, "waiting_blocks": waiting, **counts}

    def close(self) -> None:
        """End all threads and close the store. Blocks."""
        self._stop.set()
        self._look_now.set()
        self._syncer.join()
        self._uploader.close()
        self._follower.close()
        self._prober.close()
        self._store.close()

    @staticmethod
    def _tell(what: Callable[[], bool]) -> None:
        if not what():
            log.warning("other machines will be told later: the shared tier does not answer")

    def _sync_regularly(self) -> None:
        while not self._stop.is_set():
            if self._look_now.wait(self._terms.sync_s):
                self._look_now.clear()
            if not self._stop.is_set():
                self._sync()

    def _sync(self) -> None:
        try:
            for change in self._store.poll():
                keys = None if change.cleared else change.deleted
                with self._state.lock:
                    if keys is None:
                        self.counts.cleared += 1
                        self.knowledge.forget_all(change.tenant, change.namespace)
                    else:
                        self.counts.deleted += len(keys)
                        self.knowledge.forget(keys)
                self._removed(change.tenant, change.namespace, keys)
        except TierKVError as error:
            log.debug("not known what other machines have cleared: %s", error)
        except Exception:
            log.exception("looking for what other machines have cleared failed unexpectedly")
