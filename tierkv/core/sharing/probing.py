"""Asking the shared tier what it has, before somebody needs it.

A question is asked by a thread of its own pool, without the engine's lock; its answer becomes knowledge of the index.
Requests that want to know the same share one question. Those that do not wait any more leave it running: whoever comes
next profits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from tierkv.core.chain import ChainView
from tierkv.core.sharing.knowledge import Knowledge
from tierkv.errors import TierKVError
from tierkv.storage.tier import BlockMeta

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore

__all__ = ["Prober"]

log = logging.getLogger(__name__)

THREADS = 4
_Described = Sequence[tuple[bytes, BlockMeta]]


class Prober:
    """Asks, and remembers. `lock` is the engine's."""

    def __init__(self, store: SharedStore, knowledge: Knowledge, lock: Lock) -> None:
        self._store = store
        self._knowledge = knowledge
        self._lock = lock
        self._asking: dict[bytes, Future[bool]] = {}
        self._pool = ThreadPoolExecutor(THREADS, "tierkv-probe")
        self._closed = False

    def ask(self, chain: ChainView, start: int, stop: int) -> Future[bool] | None:
        """Ask how much of a chain is there from `start`, with the lock held.

        Returns what is done when that is known, or the tier has not answered: then it is False. None when there is
        nothing to ask: the tier does not answer, or has said a moment ago that the first block is not there.
        """
        first = chain.key(start, chain.groups[0])
        asked = self._asking.get(first)
        if asked is not None:
            return asked
        if (
            self._closed
            or not self._store.available
            or any(self._knowledge.absent(chain.key(start, group)) for group in chain.groups)
        ):
            return None
        begin = start if chain.gapless else 0
        wanted = [chain.described(group, begin, stop) for group in chain.groups]
        done: Future[bool] = Future()
        self._asking[first] = done
        self._pool.submit(self._run, first, wanted, chain.gapless, done)
        return done

    def look(self, wanted: _Described, *, gapless: bool) -> int:
        """Ask for blocks of one area now; return how many of the first of them are there. Blocks.

        Raises `Unavailable`.
        """
        meta = wanted[0][1]
        area = self._store.area(meta.tenant, meta.namespace)
        keys = [key for key, _ in wanted]
        held = [True] * area.holds(keys) if gapless else area.held(keys)
        with self._lock:
            self._knowledge.note_held(item for item, there in zip(wanted, held, strict=False) if there)
            for (key, _), there in zip(wanted, held, strict=False):
                if not there:
                    self._knowledge.note_absent(key)
            if len(held) < len(wanted):
                self._knowledge.note_absent(keys[len(held)])
        return next((count for count, there in enumerate(held) if not there), len(held))

    def close(self) -> None:
        """Ask no more. Blocks until running questions are answered or given up."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)

    def _run(self, first: bytes, wanted: Sequence[_Described], gapless: bool, done: Future[bool]) -> None:
        answered = False
        try:
            for blocks in wanted:
                if not self.look(blocks, gapless=gapless) and gapless:
                    break
            answered = True
        except TierKVError as error:
            log.debug("the shared tier was asked in vain: %s", error)
        except Exception:
            log.exception("a question to the shared tier failed unexpectedly")
        finally:
            with self._lock:
                del self._asking[first]
            done.set_result(answered)
