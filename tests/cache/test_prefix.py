"""Prefix lengths against their definition, taken literally."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.prefix import hit_length, needed_blocks
from tierkv.spec import KVGroup

BLOCK_TOKENS = 4

windows = st.integers(1, 40).map(lambda n: KVGroup((0,), "sliding_window", 1, 8, window=n))
groups = st.lists(
    st.one_of(st.just(KVGroup((0,), "full", 1, 8)), st.just(KVGroup((0,), "mla", 1, 8)), windows),
    min_size=1,
    max_size=3,
)


def needs(group: KVGroup, length: int, index: int) -> bool:
    """Whether a block holds a token that the token after a prefix of `length` blocks still attends to."""
    last_token = (index + 1) * BLOCK_TOKENS - 1
    return group.kind != "sliding_window" or last_token >= length * BLOCK_TOKENS - group.window


@given(groups, st.integers(0, 12))
def test_needed_blocks(groups: list[KVGroup], length: int) -> None:
    for group in groups:
        assert list(needed_blocks(group, length, BLOCK_TOKENS)) == [i for i in range(length) if needs(group, length, i)]


@given(groups, st.integers(0, 10), st.data())
def test_hit_length_is_the_longest_prefix_with_all_it_needs(
    groups: list[KVGroup], total: int, data: st.DataObject
) -> None:
    places = [(index, g) for index in range(total) for g in range(len(groups))]
    absent = data.draw(st.sets(st.sampled_from(places))) if places else set()
    asked: list[tuple[int, int]] = []

    def has(index: int, g: int) -> bool:
        asked.append((index, g))
        return (index, g) not in absent

    longest = max(
        length
        for length in range(total + 1)
        if all(
            (index, g) not in absent
            for index in range(length)
            for g, group in enumerate(groups)
            if needs(group, length, index)
        )
    )
    assert hit_length(groups, total, BLOCK_TOKENS, has) == longest
    assert len(asked) == len(set(asked))
