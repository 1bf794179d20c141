"""The prefix tree of the blocks in memory, folded for people: shared trunks, their branches, and how they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.core.index import Entry
from tierkv.storage.tier import NO_PARENT

__all__ = ["Trunk", "fold"]


@dataclass(frozen=True, slots=True)
class Trunk:
    """A run of blocks that follow each other without a branch.

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

    A trunk also ends where its blocks were used less often than those before: there the shared part ends.
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
            if len(after) != 1 or after[0].uses != head.uses:
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
    """Keep the most used, and of those only the ones whose parents are kept, too."""
    ranked = sorted(trunks, key=lambda trunk: (-trunk.uses, trunk.depth, -trunk.nbytes))
    kept: set[str] = set()
    chosen: list[Trunk] = []
    for trunk in ranked:
        if len(chosen) == most:
            break
        if not trunk.parent or trunk.parent in kept:
            kept.add(trunk.id)
            chosen.append(trunk)
    return chosen
