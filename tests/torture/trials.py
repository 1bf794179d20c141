"""Damage a store, use it, and tell what happened: ``python -m tests.torture.trials DIRECTORY FIRST STOP``.

Every trial runs in a process of its own, forked from this one, on its own copy of a small store. A line of JSON per
trial says what was damaged, which signal killed the process if one did, and what the tier said it found.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.torture.harms import HARMS, TREE_PAGES
from tests.torture.support import block, holds, key_of, put
from tierkv.storage.cold import ColdTier

SETTINGS: dict[str, Any] = {"capacity_bytes": 8 << 20, "segment_bytes": 1 << 20, "codec": "raw", "sync": "none"}
# More than one segment each; one has small blocks in its leaves, the other a tree of two levels.
MIXED = {number: block(number, 6000 if number % 2 else 700) for number in range(300)}
PLAIN = {number: block(number, 2500) for number in range(250)}
NEW = {number: block(number, 2500) for number in range(1000, 1020)}
LARGE = {number: block(number, 180_000) for number in range(2000, 2060)}
PATIENCE_S = 30


def main() -> None:
    directory, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    templates = {}
    for name, blocks in (("mixed", MIXED), ("plain", PLAIN)):
        with closing(ColdTier(directory / name, **SETTINGS)) as tier:
            assert not put(tier, blocks)
        templates[name] = blocks
    plan = [(harm, mode) for harm in HARMS for mode in ("running", "closed")]
    for number in range(first, stop):
        harm, mode = plan[number % len(plan)]
        name = random.Random(number).choice(list(templates))
        store = directory / "store"
        shutil.copytree(directory / name, store)
        blocks = templates[name]
        result = forked(lambda: trial(store, blocks, harm, mode, number))  # noqa: B023
        if "signal" in result:
            result["again"] = forked(lambda: second_life(store, blocks))  # noqa: B023
        print(json.dumps({"harm": harm, "mode": mode, "number": number, **result}), flush=True)
        shutil.rmtree(store)


def trial(store: Path, blocks: dict[int, bytes], harm: str, mode: str, number: int) -> dict[str, Any]:
    """Damage one segment before or after the store is opened, then read, repair, restart, recycle."""
    rng = random.Random(number)
    if mode == "closed":
        inflict(harm, store, rng)
    with closing(ColdTier(store, **SETTINGS)) as tier:
        if mode == "running":
            inflict(harm, store, rng)
        lost = sum(not holds(tier, n, data) for n, data in blocks.items())
        if lost and not tier.damage and (harm, mode) != ("removed", "closed"):
            raise AssertionError(f"{lost} blocks are gone and nobody says why")
        # What is found only while writing costs blocks that were there a moment before: they are stored once more.
        refused = [*put(tier, blocks | NEW), *put(tier, blocks | NEW)]
        if refused:
            raise AssertionError(f"a store was refused: {refused[0]!r}")
        unmended = [n for n, data in (blocks | NEW).items() if not holds(tier, n, data)]
        found = dict(tier.damage)
        if unmended:  # damage that reading found after the second store
            if not found:
                raise AssertionError(f"{len(unmended)} blocks are gone after a store and nobody says why")
            assert not put(tier, blocks | NEW)
            assert all(holds(tier, n, data) for n, data in (blocks | NEW).items())
    with closing(ColdTier(store, **SETTINGS)) as tier:
        after = sum(not holds(tier, n, data) for n, data in (blocks | NEW).items())
        if after and not tier.damage and harm not in ("removed", "renamed", "replaced"):
            raise AssertionError(f"{after} blocks are gone after a restart and nobody says why")
        found_later = dict(tier.damage)
        for n in rng.sample(sorted(blocks), 20):
            tier.delete(key_of(n))
        tier.touch([key_of(n) for n in blocks])
        refused = [*put(tier, LARGE), *put(tier, blocks | NEW)]  # every old segment is emptied on the way
        if refused:
            raise AssertionError(f"a store was refused while segments were recycled: {refused[0]!r}")
        assert all(holds(tier, n, data) for n, data in NEW.items())
    return {"lost": lost, "damage": found, "later": found_later}


def inflict(harm: str, store: Path, rng: random.Random) -> None:
    """Do it to some segment that has what is to be damaged."""
    segments = sorted(store.glob("segment-*.lmdb"))
    rng.shuffle(segments)
    for path in segments:
        try:
            HARMS[harm](path, rng)
        except KeyError as missing:
            if missing.args[0] not in TREE_PAGES:
                raise
        else:
            return


def second_life(store: Path, blocks: dict[int, bytes]) -> dict[str, Any]:
    """What the next start makes of a store whose process died."""
    with closing(ColdTier(store, **SETTINGS)) as tier:
        lost = sum(not holds(tier, n, data) for n, data in blocks.items())
        assert not put(tier, blocks)
        assert not put(tier, blocks)
        assert all(holds(tier, n, data) for n, data in blocks.items())
        return {"lost": lost, "damage": dict(tier.damage)}


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a child; return its result, its error, or the signal it died of."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB's last words
        signal.alarm(PATIENCE_S)
        try:
            result = work()
        except BaseException as error:
            result = {"error": "".join(traceback.format_exception(error))[-2000:]}
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": signal.Signals(os.WTERMSIG(status)).name}
    result = json.loads(said)
    assert isinstance(result, dict)
    return result


if __name__ == "__main__":
    main()
