"""Blocks that another machine computes: who says so, and waiting for them.

A claim in the shared tier says that a machine is computing what follows a block. It expires unless the machine renews
it with every progress, so one that died, or lost its connection, holds nobody up for longer than one such time.
Whoever waits looks again and again for more of the chain, and for the claim to be free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

from tierkv.core.chain import ChainView
from tierkv.core.sharing.counts import SharedCounts
from tierkv.core.sharing.probing import Prober
from tierkv.errors import TierKVError
from tierkv.storage.tier import BlockMeta

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore

__all__ = ["Claim", "Follower"]

log = logging.getLogger(__name__)

LOOK_S = 0.05
_Described = Sequence[tuple[bytes, BlockMeta]]


@dataclass(slots=True, eq=False)
class Claim:
    """A machine's word that it computes a block, and what follows. `key` moves on with what it has computed.

    `renewing`: it is about to say so again.
    """

    meta: BlockMeta
    key: bytes
    ttl_s: float
    renewing: bool = False


@dataclass(slots=True, eq=False)
class _Followed:
    wanted: Sequence[_Described]
    gapless: bool
    claim_s: float
    done: Future[None]


class Follower:
    """Announces what this machine computes, and waits for what others do. `lock` is the engine's."""

    def __init__(self, store: SharedStore, prober: Prober, counts: SharedCounts, lock: Lock) -> None:
        self._store = store
        self._prober = prober
        self._counts = counts
        self._lock = lock
        self._asking: dict[bytes, Future[Claim | None]] = {}
        self._followed: list[_Followed] = []
        self._changed = Condition(lock)
        self._closed = False
        self._pool = ThreadPoolExecutor(2, "tierkv-claim")
        self._thread = Thread(target=self._work, name="tierkv-follow", daemon=True)
        self._thread.start()

    def claim(self, chain: ChainView, start: int, stop: int, ttl_s: float) -> Future[Claim | None]:
        """Announce that this machine computes a chain from block `start`, with the lock held.

        The answer is None when another one does. It is asked at the same time whether the block has come meanwhile. A
        tier that does not answer, or knows no claims, is no reason not to compute.
        """
        wanted = [chain.described(group, start, stop) for group in chain.groups]
        key, meta = wanted[0][0]
        asked = self._asking.get(key)
        if asked is None:
            asked = self._asking[key] = Future()
            self._submit(self._claim, Claim(meta, key, ttl_s), wanted, chain.gapless, asked)
        return asked

    def progressed(self, claim: Claim, key: bytes) -> None:
        """Renew a claim, for the block that is computed next (with the lock held).

        Whoever has got the blocks before it asks for that one. The claims on those run out by themselves.
        """
        claim.key = key
        if not claim.renewing:
            claim.renewing = True
            self._submit(self._renew, claim)

    def ended(self, claim: Claim) -> None:
        """Give a claim up (with the lock held)."""
        self._submit(self._unclaim, claim)

    def follow(self, chain: ChainView, start: int, stop: int, claim_s: float, done: Future[None]) -> None:
        """Complete `done` when more of a chain has come, with the lock held.

        Also when the tier does not answer, and when nobody else computes any more if `claim_s` is not 0.
        """
        wanted = [chain.described(group, start, stop) for group in chain.groups]
        self._followed.append(_Followed(wanted, chain.gapless, claim_s, done))
        self._changed.notify()

    def forget(self, done: Future[None]) -> None:
        """Wait no more (with the lock held)."""
        self._followed = [followed for followed in self._followed if followed.done is not done]

    def close(self) -> None:
        """End all waiting. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        if not self._closed:
            self._pool.submit(work, *arguments)

    def _claim(self, claim: Claim, wanted: Sequence[_Described], gapless: bool, asked: Future[Claim | None]) -> None:
        outcome = "granted"
        try:
            if self._claimed(claim) is False:
                outcome = "elsewhere"
            else:
                for blocks in wanted:
                    self._prober.look(blocks, gapless=gapless)
        except TierKVError as error:
            log.debug("a prefill was not announced: %s", error)
            outcome = "failed"
        finally:
            with self._lock:
                self._counts.claims[outcome] += 1
                del self._asking[claim.key]
            asked.set_result(None if outcome == "elsewhere" else claim)

    def _claimed(self, claim: Claim) -> bool | None:
        return self._store.area(claim.meta.tenant, claim.meta.namespace).claim(claim.key, claim.ttl_s)

    def _renew(self, claim: Claim) -> None:
        with self._lock:
            claim.renewing = False
        try:
            self._claimed(claim)
        except TierKVError as error:
            log.debug("a claim was not renewed: %s", error)

    def _unclaim(self, claim: Claim) -> None:
        try:
            self._store.area(claim.meta.tenant, claim.meta.namespace).unclaim(claim.key)
        except TierKVError as error:
            log.debug("a claim was not given up: %s", error)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._followed and not self._closed:
                    self._changed.wait()
                if self._closed:
                    for followed in self._followed:
                        if not followed.done.done():
                            followed.done.set_result(None)
                    return
                looking = list(self._followed)
            over = [followed for followed in looking if self._look(followed)]
            with self._changed:
                for followed in over:
                    if followed in self._followed:
                        self._followed.remove(followed)
                        if not followed.done.done():
                            followed.done.set_result(None)
                if self._followed and not self._closed:
                    self._changed.wait(LOOK_S)

    def _look(self, followed: _Followed) -> bool:
        """Say whether there is a reason not to wait any more."""
        (key, meta), *_ = followed.wanted[0]
        try:
            found = [self._prober.look(blocks, gapless=followed.gapless) for blocks in followed.wanted]
            if all(found):
                return True
            if not followed.claim_s:
                return False
            return self._store.area(meta.tenant, meta.namespace).claim(key, followed.claim_s) is not False
        except TierKVError as error:
            log.debug("another machine's blocks are not waited for: %s", error)
            return True
