"""The prefix tree of the blocks in memory, folded for people: shared trunks, their branches, and how they are used."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.core.index import Entry
from tierkv.storage.tier import NO_PARENT

__all__ = ["Trunk", "fold"]


@dataclass(frozen=True, slots=True)
class Trunk:
    """A run of blocks that follow each other without a branch, and are used about equally often.

    Attributes
    ----------
    id
        Names it in this answer.
    parent
        The trunk it branches off; empty for one that begins a chain (or whose beginning is not in memory).
    tenant
        Id of the tenant that stored its first block.
    namespace
        Fingerprint.
    depth, blocks
        Blocks before it in its chain, and its own.
    nbytes
        Size of its blocks.
    branches
        Trunks that go on from its end.
    uses
        Requests that used its first block since it came into memory.
    used
        When one did so last (monotonic seconds); 0 for never.
    """

    id: str
    parent: str
    tenant: bytes
    namespace: bytes
    depth: int
    blocks: int
    nbytes: int
    branches: int
    uses: int
    used: float


def fold(entries: Iterable[Entry], most: int) -> list[Trunk]:
    """Return the `most` most used trunks of the blocks of KV group 0, parents before their branches.

    A trunk also ends where blocks were used less than half as often as its first, or more than twice: there what is
    shared ends, though its branches have left memory.
    """
    blocks = {entry.key: entry for entry in entries if entry.meta.group == 0}
    children: dict[bytes, list[Entry]] = {}
    heads: list[Entry] = []
    for entry in blocks.values():
        if entry.meta.parent in blocks and entry.meta.parent != NO_PARENT:
            children.setdefault(entry.meta.parent, []).append(entry)
        else:
            heads.append(entry)
    trunks: list[Trunk] = []
    todo = [(head, "") for head in heads]
    while todo:
        head, parent = todo.pop()
        end, count, nbytes = head, 1, head.meta.length
        while True:
            after = children.get(end.key, [])
            if len(after) != 1 or not head.uses <= 2 * after[0].uses <= 4 * head.uses:
                break
            end = after[0]
            count += 1
            nbytes += end.meta.length
        name = head.key[:8].hex()
        meta = head.meta
        trunks.append(
            Trunk(
                name, parent, meta.tenant, meta.namespace, meta.depth, count, nbytes, len(after), head.uses, head.used
            )
        )
        todo.extend((entry, name) for entry in after)
    return _best(trunks, most)


def _best(trunks: list[Trunk], most: int) -> list[Trunk]:
    """Keep the most used, starting from the beginnings of chains, so that every trunk kept has its parent."""
    branches: dict[str, list[Trunk]] = {}
    for trunk in trunks:
        branches.setdefault(trunk.parent, []).append(trunk)
    reached = [_rank(trunk) for trunk in branches.get("", ())]
    heapq.heapify(reached)
    chosen: list[Trunk] = []
    while reached and len(chosen) < most:
        trunk = heapq.heappop(reached)[-1]
        chosen.append(trunk)
        for branch in branches.get(trunk.id, ()):
            heapq.heappush(reached, _rank(branch))
    return chosen


def _rank(trunk: Trunk) -> tuple[int, int, str, Trunk]:
    return -trunk.uses, -trunk.nbytes, trunk.id, trunk
