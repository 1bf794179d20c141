"""The tree of prompts: what is known is known exactly, and folding loses no count."""

from __future__ import annotations

import random
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from tests.traces import block_key
from tierkv.insight.live.tally import Tally
from tierkv.insight.live.templates import find_templates
from tierkv.insight.live.tree import Area, PrefixTree, descendants

AREA = Area(b"t" * 8, b"n" * 32, 4)
# Equal numbers behind equal prefixes are equal blocks; a prompt is a path in a small tree of choices.
prompts = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=40)


def hashes(choices: list[int]) -> list[bytes]:
    """Chain hashes: each depends on all choices before it."""
    return [block_key(int("1" + "".join(map(str, choices[: depth + 1])), 3)) for depth in range(len(choices))]


def count(tree: PrefixTree, area: Area, choices: list[int]) -> int:
    """Walk, count the request as all new, keep to the bounds; return how many blocks were known."""
    walk = tree.walk(area, hashes(choices))
    walk.ended.tally.note([], {"new": len(choices)}, area.block_tokens, 0.5)
    tree.trim()
    return walk.known


def all_counted(tree: PrefixTree) -> tuple[int, int, int]:
    """Requests and tokens of all nodes, and of the templates and the rest."""
    nodes, found = Tally(), Tally()
    for _, root in tree.roots():
        for node in descendants(root):
            nodes.add(node.tally)
    templates, rest = find_templates(tree)
    for tally in (*(template.tally for template in templates), *(tally for _, tally in rest)):
        found.add(tally)
        assert sum(tally.lost_tokens.values()) == tally.requested_tokens
    assert (nodes.requests, nodes.requested_tokens) == (found.requests, found.requested_tokens)
    assert sum(nodes.lost_s.values()) == sum(found.lost_s.values())
    return nodes.requests, nodes.requested_tokens, sum(nodes.lost_tokens.values())


def common(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(prompts)
def test_known_is_the_longest_prefix_that_was_asked_for_before(asked: list[list[int]]) -> None:
    tree = PrefixTree()
    for number, prompt in enumerate(asked):
        expected = max((common(prompt, earlier) for earlier in asked[:number]), default=0)
        assert count(tree, AREA, prompt) == expected
    tokens = sum(map(len, asked)) * AREA.block_tokens
    assert all_counted(tree) == (len(asked), tokens, tokens)


@given(prompts, st.integers(1500, 12_000))
def test_folding_keeps_every_count_and_knows_no_more_than_was_asked(asked: list[list[int]], most: int) -> None:
    tree = PrefixTree(most_bytes=most)
    for number, prompt in enumerate(asked):
        expected = max((common(prompt, earlier) for earlier in asked[:number]), default=0)
        assert count(tree, AREA, prompt) <= expected
    tokens = sum(map(len, asked)) * AREA.block_tokens
    assert all_counted(tree) == (len(asked), tokens, tokens)


def test_memory_stays_within_its_bounds_however_much_passes() -> None:
    most = 200_000
    tree = PrefixTree(most_bytes=most, most_areas=10)
    choose = random.Random(1)
    for number in range(4000):
        area = Area(number.to_bytes(8, "little") if number % 7 == 0 else b"t" * 8, b"n" * 32, 4)
        tree.walk(area, [block_key(choose.randrange(50))] + [block_key(choose.randrange(10**9)) for _ in range(20)])
        tree.trim()
        assert tree.nbytes <= most
        assert len(tree) <= 10
    assert sum(1 for _, root in tree.roots() for _ in descendants(root)) > 50


def test_areas_know_nothing_of_each_other() -> None:
    tree = PrefixTree()
    other = Area(b"o" * 8, AREA.namespace, AREA.block_tokens)
    assert [count(tree, area, [0, 1, 2]) for area in (AREA, other, AREA, other)] == [0, 0, 3, 3]


def test_text_is_cut_where_blocks_are() -> None:
    tree = PrefixTree()
    whole = list(range(12))
    tree.walk(AREA, hashes([0, 1, 2]), whole)
    tree.walk(AREA, hashes([0, 1, 0]), [*whole[:8], 90, 91, 92, 93, 94])
    (_, root), *_ = tree.roots()
    assert sorted(list(node.text or ()) for node in descendants(root)) == [[], whole[:8], whole[8:], [90, 91, 92, 93]]
