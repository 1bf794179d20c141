"""Many blocks at once: as many under way as the link allows, coded and decoded meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from tierkv.errors import TierKVError, Unavailable
from tierkv.storage.shared.link import Link
from tierkv.storage.tier import Buffer

__all__ = ["Done", "read_all", "write_all"]

_T = TypeVar("_T")
Done = Callable[[int, _T | TierKVError], None]
_SLACK_S = 1.0


def read_all(
    link: Link,
    names: Sequence[str],
    decode: Callable[[int, Buffer | None], _T],
    coders: Executor | None,
    done: Done[_T] | None,
) -> list[_T | TierKVError]:
    """Read values and decode them as they come. Blocks.

    `decode` is called with the index of a name and what was found there; what it returns, or the `TierKVError` it
    raises, is the outcome. No more values than may be in flight wait for their turn.
    """
    outcomes: list[_T | TierKVError | None] = [None] * len(names)
    landed: SimpleQueue[tuple[int, Buffer | TierKVError | None]] = SimpleQueue()

    def start(index: int) -> None:
        link.start_get(names[index], lambda outcome: landed.put((index, outcome)))

    def settle(index: int, outcome: _T | TierKVError) -> None:
        outcomes[index] = outcome
        if done is not None:
            done(index, outcome)

    def work(index: int, data: Buffer | None) -> _T | TierKVError:
        try:
            return decode(index, data)
        except TierKVError as error:
            return error

    started = min(link.limits.in_flight, len(names))
    for index in range(started):
        start(index)
    waiting = set(range(len(names)))
    decoding: deque[tuple[int, Future[_T | TierKVError]]] = deque()
    for _ in range(len(names)):
        try:
            index, outcome = landed.get(timeout=link.limits.transfer_timeout_s + _SLACK_S)
        except Empty:
            break
        waiting.discard(index)
        if started < len(names):
            start(started)
            started += 1
        if isinstance(outcome, TierKVError):
            settle(index, outcome)
        elif coders is None:
            settle(index, work(index, outcome))
        else:
            decoding.append((index, coders.submit(work, index, outcome)))
            while decoding and (decoding[0][1].done() or len(decoding) > link.limits.in_flight):
                at, job = decoding.popleft()
                settle(at, job.result())
    for at, job in decoding:
        settle(at, job.result())
    for index in sorted(waiting):
        settle(index, _stuck())
    return [outcome for outcome in outcomes if outcome is not None]


def write_all(
    link: Link,
    wanted: Sequence[tuple[int, str]],
    value: Callable[[int], bytes],
    coders: Executor | None,
    done: Done[None] | None,
) -> dict[int, TierKVError | None]:
    """Make values and write them under names, one outcome per index. Blocks.

    `value` is called with an index, while values made before are under way; the `TierKVError` it raises is the outcome.
    """
    outcomes: dict[int, TierKVError | None] = {}
    landed: SimpleQueue[tuple[int, TierKVError | None]] = SimpleQueue()
    under_way: set[int] = set()

    def settle(index: int, outcome: TierKVError | None) -> None:
        under_way.discard(index)
        outcomes[index] = outcome
        if done is not None:
            done(index, outcome)

    def land(index: int, outcome: Buffer | TierKVError | None) -> None:
        landed.put((index, outcome if isinstance(outcome, TierKVError) else None))

    def await_one() -> None:
        try:
            settle(*landed.get(timeout=link.limits.transfer_timeout_s + _SLACK_S))
        except Empty:
            for index in sorted(under_way):
                settle(index, _stuck())

    for (index, name), made in zip(wanted, _made([index for index, _ in wanted], value, coders), strict=True):
        if isinstance(made, TierKVError):
            settle(index, made)
            continue
        while len(under_way) >= link.limits.in_flight:
            await_one()
        under_way.add(index)
        link.start_put(name, made, partial(land, index))
    while under_way:
        await_one()
    return outcomes


def _made(
    indices: Sequence[int], value: Callable[[int], bytes], coders: Executor | None
) -> Iterator[bytes | TierKVError]:
    def make(index: int) -> bytes | TierKVError:
        try:
            return value(index)
        except TierKVError as error:
            return error

    if coders is None:
        yield from map(make, indices)
        return
    ahead: deque[Future[bytes | TierKVError]] = deque()
    for index in indices:
        ahead.append(coders.submit(make, index))
        if len(ahead) > _AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


_AHEAD = 4
"""Values made before it is their turn to be written."""


def _stuck() -> Unavailable:
    return Unavailable(
        "the shared tier did not answer in time (its event loop is stuck)", remedy="see whether the process has a CPU"
    )
