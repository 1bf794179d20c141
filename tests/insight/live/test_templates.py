"""Templates: what many prompts begin with, who leaves it early, and what that costs."""

from __future__ import annotations

import itertools

from tests.traces import block_key
from tierkv.insight.live.templates import Template, find_templates
from tierkv.insight.live.tree import Area, PrefixTree

AREA = Area(b"t" * 8, b"n" * 32, 4)
fresh = itertools.count(10**6)


def ask(tree: PrefixTree, *runs: range, new: int = 0, area: Area = AREA) -> None:
    """A prompt of known runs of blocks and then `new` ones, of which the new ones are missed."""
    prompt = [number for run in runs for number in run] + [next(fresh) for _ in range(new)]
    walk = tree.walk(area, [block_key(number) for number in prompt])
    walk.ended.tally.note(["warm"] * walk.known, {"new": len(prompt) - walk.known}, area.block_tokens, None)
    tree.trim()


def only(templates: list[Template]) -> Template:
    (template,) = templates
    return template


SYSTEM = range(10)


def test_a_beginning_that_many_share_is_a_template() -> None:
    tree = PrefixTree()
    for _ in range(20):
        ask(tree, SYSTEM, new=5)
    template = only(find_templates(tree)[0])
    assert (template.start, template.end, template.entered, template.tally.requests) == (0, 40, 20, 20)
    assert template.divergences == ()


def test_few_requests_make_no_template() -> None:
    tree = PrefixTree()
    for _ in range(3):
        ask(tree, SYSTEM, new=5)
    templates, rest = find_templates(tree)
    assert templates == []
    assert [(area, tally.requests) for area, tally in rest] == [(AREA, 3)]


def test_leaving_a_template_early_is_told_where_and_what_it_costs() -> None:
    """One of five has something else after six of ten blocks, followed by the same as the others."""
    tree = PrefixTree()
    for number in range(50):
        if number % 5 != 1:
            ask(tree, SYSTEM, new=3)
        else:
            ask(tree, SYSTEM[:6], new=20)
    template = only(find_templates(tree)[0])
    (point,) = template.divergences
    assert (template.end, point.token, point.requests) == (40, 24, 10)
    assert point.lost_tokens == 10 * 4 * AREA.block_tokens
    assert template.tally.lost_tokens["diverged"] == point.lost_tokens
    assert (
        sum(template.tally.lost_tokens.values())
        == 4 * (10 + 9 * 20 + 20 + 40 * 3)
        == (template.tally.requested_tokens - sum(template.tally.hit_tokens.values()))
    )


def test_the_turns_of_a_conversation_that_left_early_do_not_leave_again() -> None:
    tree = PrefixTree()
    for _ in range(20):
        ask(tree, SYSTEM, new=3)
    own = range(500, 504)
    for turns in range(1, 4):
        ask(tree, SYSTEM[:6], own, range(600, 600 + 2 * turns))
    (point,) = only(find_templates(tree)[0]).divergences
    assert (point.token, point.requests) == (24, 1)


def test_what_a_part_of_the_prompts_shares_is_a_template_of_its_own() -> None:
    tree = PrefixTree()
    for _ in range(20):
        ask(tree, SYSTEM, range(100, 110), new=2)
        ask(tree, SYSTEM, range(200, 204), new=2)
        ask(tree, SYSTEM, new=2)
    templates = {template.start: template for template in find_templates(tree)[0] if template.start == 0}
    branches = [template for template in find_templates(tree)[0] if template.start]
    assert (templates[0].end, templates[0].entered, templates[0].tally.requests) == (40, 60, 20)
    assert sorted((branch.start, branch.end, branch.tally.requests) for branch in branches) == [
        (40, 56, 20),
        (40, 80, 20),
    ]
    assert {branch.parent for branch in branches} == {templates[0].key}


def test_prompts_without_anything_in_common_belong_to_nothing() -> None:
    tree = PrefixTree()
    for _ in range(100):
        ask(tree, new=10)
    templates, rest = find_templates(tree)
    assert templates == []
    assert rest[0][1].requests == 100
