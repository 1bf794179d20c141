"""The prompts that were asked for, as a tree of blocks, in bounded memory.

Every request walks down as far as its prompt is known, and leaves there: what follows is new, and is added as a leaf.
It is counted where its prompt ends. When there is too much to remember, the leaves that were not used for longest are
folded into the blocks before them, counts and all: nothing that was counted is lost, it only becomes less precise.

Blocks are remembered by eight bytes of their chain hashes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tierkv.insight.live.tally import Tally

__all__ = ["Area", "Node", "PrefixTree", "Walk"]

_BYTES = 8  # of a block's hash that are kept
_KEPT_SHARE = 0.75  # of what may be kept is left by folding, so that it is not needed with every request
_NODE_BYTES = 1024  # what a node costs beside its blocks: two tables and a tally


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that follow each other without a branch.

    Attributes
    ----------
    run
        `_BYTES` of each of its blocks.
    start
        Blocks before it.
    tally
        Of the requests whose prompts end with it, or in what was folded into it.
    left, left_tokens
        Requests whose known part ended with it though they went on, and the tokens that were new.
    founded
        Tokens that were new of the request that left its parent to found it; 0 for one that was cut off another.
    text
        Token ids of its blocks, where they are kept.
    used
        Number of the walk that came by last.
    """

    run: bytes
    start: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    left: int = 0
    left_tokens: int = 0
    founded: int = 0
    text: array[int] | None = None
    used: int = 0

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.run) // _BYTES

    @property
    def first(self) -> bytes:
        """What its first block is remembered by."""
        return self.run[:_BYTES]


@dataclass(frozen=True, slots=True)
class Area:
    """What the prompts of one tenant in one namespace are told apart by: its id and the namespace's fingerprint."""

    tenant: bytes
    namespace: bytes
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a prompt led: the node it ended with, the one where its known part did, and how many blocks that has."""

    ended: Node
    left: Node
    known: int


class PrefixTree:
    """One tree for each area, all within the same bounds. Not safe for use by several threads.

    Parameters
    ----------
    most_bytes
        About how much memory it takes at most.
    most_areas
        How many areas it knows at once; the one that was not used for longest is forgotten.
    """

    def __init__(self, most_bytes: int = 16 << 20, most_areas: int = 1024) -> None:
        self._most_bytes = most_bytes
        self._most_areas = most_areas
        self._roots: dict[Area, Node] = {}
        self._nbytes = 0
        self._walks = 0

    def __len__(self) -> int:
        """Return the number of areas."""
        return len(self._roots)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return self._nbytes

    def roots(self) -> Iterator[tuple[Area, Node]]:
        """Yield the areas with their roots, which have no blocks."""
        yield from self._roots.items()

    def walk(self, area: Area, hashes: Sequence[bytes], tokens: Sequence[int] | None = None) -> Walk:
        """Find how much of a prompt is known, and know all of it from now on.

        Parameters
        ----------
        hashes
            Chain hashes of its blocks, from the first.
        tokens
            Its token ids, to be kept.
        """
        self._walks += 1
        chain = b"".join([chain_hash[:_BYTES] for chain_hash in hashes])
        node = self._root(area)
        at = 0
        while at < len(chain):
            child = node.children.get(chain[at : at + _BYTES])
            if child is None:
                break
            shared = _shared(child.run, chain, at)
            node = child if shared == len(child.run) else self._split(child, shared, area.block_tokens)
            node.used = self._walks
            at += shared
            if node is not child:
                break
        left, known = node, at // _BYTES
        if at < len(chain):
            new = (len(hashes) - known) * area.block_tokens
            left.left += 1
            left.left_tokens += new
            node = Node(chain[at:], known, left, founded=new, used=self._walks)
            if tokens is not None:
                node.text = array("I", tokens[known * area.block_tokens : len(hashes) * area.block_tokens])
            left.children[node.first] = node
            self._nbytes += _size(node)
        return Walk(node, left, known)

    def trim(self) -> None:
        """Keep to the bounds. To be called when what was walked has been counted."""
        while len(self._roots) > self._most_areas:
            area = min(self._roots, key=lambda area: self._roots[area].used)
            self._nbytes -= sum(_size(node) for node in descendants(self._roots.pop(area)))
        if self._nbytes > self._most_bytes:
            self._fold()

    def _root(self, area: Area) -> Node:
        root = self._roots.get(area)
        if root is None:
            root = self._roots[area] = Node(b"", 0, None)
            self._nbytes += _size(root)
        root.used = self._walks
        return root

    def _split(self, node: Node, at: int, block_tokens: int) -> Node:
        """Cut a run in two; return the upper part."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.run[:at], node.start, parent, founded=node.founded, used=node.used)
        parent.children[upper.first] = upper
        node.run, node.start, node.parent, node.founded = node.run[at:], upper.end, upper, 0
        upper.children[node.first] = node
        if node.text is not None:
            cut = at // _BYTES * block_tokens
            upper.text, node.text = node.text[:cut], node.text[cut:]
        self._nbytes += _NODE_BYTES
        return upper

    def _fold(self) -> None:
        """Fold leaves into what is before them, those not used for longest first."""
        leaves = [
            (node.used, node.end, id(node), node)
            for root in self._roots.values()
            for node in descendants(root)
            if node.parent is not None and not node.children
        ]
        heapq.heapify(leaves)
        while leaves and self._nbytes > _KEPT_SHARE * self._most_bytes:
            leaf = heapq.heappop(leaves)[-1]
            parent = leaf.parent
            assert parent is not None
            parent.tally.add(leaf.tally)
            del parent.children[leaf.first]
            leaf.parent = None
            self._nbytes -= _size(leaf)
            if not parent.children and parent.parent is not None:
                heapq.heappush(leaves, (parent.used, parent.end, id(parent), parent))


def descendants(root: Node) -> Iterator[Node]:
    """Yield a node and all below it, parents before their children."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def _size(node: Node) -> int:
    return _NODE_BYTES + len(node.run) + (4 * len(node.text) if node.text is not None else 0)


def _shared(run: bytes, chain: bytes, at: int) -> int:
    """Return the length in bytes of what a run has in common with a chain from `at`, in whole blocks, at least one."""
    if chain.startswith(run, at):
        return len(run)
    low, high = 1, min(len(run), len(chain) - at) // _BYTES  # blocks known to agree, and that may agree
    while low < high:
        middle = (low + high + 1) // 2
        if chain.startswith(run[: middle * _BYTES], at):
            low = middle
        else:
            high = middle - 1
    return low * _BYTES
