"""Templates: beginnings that many prompts share, found as the heavy paths of the tree of prompts.

A template's trunk begins where prompts begin, or where a part of another template's prompts goes a way of its own. It
goes on as long as at least half of those that began it do. A request belongs to the last template whose trunk it
entered. Where it left the known part of the trunk before its end, what the rest of the trunk would have given it is
lost by diverging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tierkv.insight.live.causes import DIVERGED, NEW
from tierkv.insight.live.tally import Tally
from tierkv.insight.live.tree import Area, Node, PrefixTree, descendants

__all__ = ["Divergence", "Template", "find_templates"]

_LEAST_REQUESTS = 4  # with fewer, a beginning is a coincidence
_LEAST_SHARE = 0.05  # of the requests of the template that it branches off


@dataclass(frozen=True, slots=True)
class Divergence:
    """Requests that left a template's trunk at the same place, before its end.

    Attributes
    ----------
    token
        How many tokens they had in common with it.
    requests, lost_tokens
        How many they were, and how many tokens of the trunk they could not use.
    trunk_text, left_text
        Token ids of the trunk's next block, and of those that came instead, the latest first; where they are kept.
    """

    token: int
    requests: int
    lost_tokens: int
    trunk_text: tuple[int, ...]
    left_text: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A shared beginning, and what became of the requests that have it.

    Attributes
    ----------
    area
        Whose prompts these are.
    key
        What the first block of the trunk is remembered by.
    parent
        That of the template it branches off; empty for one that begins prompts.
    start, end
        Where in prompts the trunk begins and ends, in tokens.
    entered
        Requests that entered the trunk; those of `tally` went on into no other template.
    tally
        What they asked for, got and lost.
    divergences
        Where they left the trunk before its end, the most frequent first.
    text
        Token ids of the trunk from its start, where they are kept.
    """

    area: Area
    key: bytes
    parent: bytes
    start: int
    end: int
    entered: int
    tally: Tally
    divergences: tuple[Divergence, ...]
    text: tuple[int, ...]


def find_templates(tree: PrefixTree) -> tuple[list[Template], list[tuple[Area, Tally]]]:
    """Return the templates of a tree, and by area what belongs to none: together all that was counted in it."""
    found: list[Template] = []
    rest: list[tuple[Area, Tally]] = []
    for area, root in tree.roots():
        through = _through(root)
        alone = Tally()
        alone.add(root.tally)
        todo = [(child, b"", 0) for child in root.children.values()]
        while todo:
            node, parent, within = todo.pop()
            if through[node] >= max(_LEAST_REQUESTS, _LEAST_SHARE * within):
                trunk = _trunk(node, through)
                found.append(_template(area, trunk, parent, through))
                todo.extend((branch, node.first, through[node]) for branch in _branches(trunk, through))
            elif not parent:
                for light in descendants(node):
                    alone.add(light.tally)
        rest.append((area, alone))
    return found, rest


def _through(root: Node) -> dict[Node, int]:
    """Count the requests that came by each node."""
    through: dict[Node, int] = {}
    for node in reversed(list(descendants(root))):
        through[node] = node.tally.requests + sum(through[child] for child in node.children.values())
    return through


def _trunk(start: Node, through: dict[Node, int]) -> list[Node]:
    trunk = [start]
    while trunk[-1].children:
        heaviest = max(trunk[-1].children.values(), key=through.__getitem__)
        if 2 * through[heaviest] < through[start] or through[heaviest] < _LEAST_REQUESTS:
            break
        trunk.append(heaviest)
    return trunk


def _off(trunk: list[Node]) -> Iterator[Node]:
    """Yield the nodes at which prompts left a trunk."""
    inside = set(map(id, trunk))
    for node in trunk:
        yield from (child for child in node.children.values() if id(child) not in inside)


def _branches(trunk: list[Node], through: dict[Node, int]) -> list[Node]:
    """Return those parts beside a trunk that are templates of their own."""
    least = max(_LEAST_REQUESTS, _LEAST_SHARE * through[trunk[0]])
    return [child for child in _off(trunk) if through[child] >= least]


def _template(area: Area, trunk: list[Node], parent: bytes, through: dict[Node, int]) -> Template:
    tally = Tally()
    for node in trunk:
        tally.add(node.tally)
    own = set(map(id, _branches(trunk, through)))
    for beside in _off(trunk):
        if id(beside) not in own:
            for node in descendants(beside):
                tally.add(node.tally)
    end = trunk[-1].end
    divergences: list[Divergence] = []
    for node, onward in pairwise(trunk):
        left = node.left - bool(onward.founded)  # whoever was the first to go on did not leave
        if left:
            lost = min(node.left_tokens - onward.founded, left * (end - node.end) * area.block_tokens)
            lost = min(lost, tally.lost_tokens[NEW])
            tally.move(NEW, DIVERGED, lost)
            divergences.append(_divergence(area, node, onward, left, lost))
    divergences.sort(key=lambda divergence: (-divergence.requests, divergence.token))
    text = [token for node in trunk if node.text is not None for token in node.text]
    first = trunk[0]
    return Template(
        area,
        first.first,
        parent,
        first.start * area.block_tokens,
        end * area.block_tokens,
        through[first],
        tally,
        tuple(divergences),
        tuple(text),
    )


def _divergence(area: Area, node: Node, onward: Node, left: int, lost: int) -> Divergence:
    others = sorted((n for n in node.children.values() if n is not onward), key=lambda n: n.used, reverse=True)
    texts = [tuple(other.text[: area.block_tokens]) for other in others if other.text]
    trunk_text = tuple(onward.text[: area.block_tokens]) if onward.text else ()
    return Divergence(node.end * area.block_tokens, left, lost, trunk_text, tuple(texts[:2]))
