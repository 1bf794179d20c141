"""The numerical core against slow, simple versions of the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.insight.lint.oracle import hit_tokens
from tierkv.insight.lint.core.batch import ragged
from tierkv.insight.lint.core.hashing import block_hashes, chunk_starts, number_repeats
from tierkv.insight.lint.core.index import BoundedIndex, UnboundedIndex
from tierkv.insight.lint.core.losses import replay_prompts
from tierkv.insight.lint.core.statistics import SegmentStatistics
from tierkv.insight.lint.core.table import HashTable
from tierkv.insight.lint.sources.ids import opaque_batch

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=12)


def batches(prompts: list[list[int]], per_batch: int) -> list:  # type: ignore[type-arg]
    result = []
    for first in range(0, len(prompts), per_batch):
        group = prompts[first : first + per_batch]
        lengths = np.array([len(prompt) for prompt in group], np.int64)
        result.append(
            opaque_batch(first, np.array([token for prompt in group for token in prompt], np.uint32), lengths, 4)
        )
    return result


@given(PROMPTS, st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_replay_finds_what_a_slow_cache_finds(prompts: list[list[int]], block: int, per_batch: int) -> None:
    index, endless = UnboundedIndex(), BoundedIndex(10**6)
    hits = [replay_prompts(batch, index, block) for batch in batches(prompts, per_batch)]
    bounded = [replay_prompts(batch, endless, block) for batch in batches(prompts, per_batch)]
    tokens = np.concatenate([hit.tokens for hit in hits])
    assert tokens.sum() == hit_tokens(prompts, block)
    assert (tokens == np.concatenate([hit.tokens for hit in bounded])).all()
    relatives = np.concatenate([hit.relatives for hit in hits])
    for number, (count, relative) in enumerate(zip(tokens.tolist(), relatives.tolist(), strict=True)):
        assert relative < number
        assert (relative >= 0) == (count > 0)
        if relative >= 0:
            assert prompts[relative][:count] == prompts[number][:count]


def test_a_bounded_cache_evicts_tails_of_the_oldest_first() -> None:
    index = BoundedIndex(3)
    chains = [np.array(chain, np.uint64) for chain in ([1, 2], [3, 4], [1, 2], [3])]
    hits = [int(index.replay(chain, np.array([chain.size]), n)[0][0]) for n, chain in enumerate(chains)]
    assert hits == [0, 0, 1, 1]


@given(st.lists(st.lists(st.integers(1, 2**64 - 1), max_size=40, unique=True), max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_table_holds_each_key_once_with_its_column(rounds: list[list[int]]) -> None:
    table, model = HashTable({"value": np.dtype(np.int64)}, capacity=4), {}
    for number, keys in enumerate(rounds):
        fresh = np.array([key for key in keys if key not in model], np.uint64)
        slots = table.insert(fresh)
        table.columns["value"][slots] = number
        model.update(dict.fromkeys(fresh.tolist(), number))
    wanted = np.array([*model, 12345], np.uint64)
    slots = table.find(wanted)
    for key, slot in zip(wanted.tolist(), slots.tolist(), strict=True):
        assert (slot >= 0) == (key in model)
        assert slot < 0 or table.columns["value"][slot] == model[key]
    assert len(table) == len(model)


@given(PROMPTS)
@settings(max_examples=60, deadline=None)
def test_equal_prefixes_hash_alike_and_others_do_not(prompts: list[list[int]]) -> None:
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    hashes, counts = block_hashes(
        np.array([token for prompt in prompts for token in prompt], np.uint32), np.cumsum(lengths) - lengths, lengths, 3
    )
    prefixes = [
        tuple(p[: 3 * (n + 1)]) for p, count in zip(prompts, counts.tolist(), strict=True) for n in range(count)
    ]
    assert len(set(prefixes)) == len(set(hashes.tolist())) == len(set(zip(prefixes, hashes.tolist(), strict=True)))


def test_text_is_cut_equally_wherever_it_stands() -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50_000, 600, dtype=np.uint32)
    ends = []
    for prefix in (0, 1, 7, 100):
        tokens = np.concatenate([rng.integers(0, 50_000, prefix, dtype=np.uint32), shared])
        cuts = chunk_starts(tokens, np.array([0]), 8) - prefix
        assert all(b - a >= 4 for a, b in pairwise(cuts.tolist()[1:]))
        ends.append(set(cuts[cuts > 12].tolist()))
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert len(ends[0]) > 30


def test_repeats_get_ids_of_their_own_the_same_in_every_request() -> None:
    ids = np.array([7, 7, 8, 7, 7, 7, 8], np.uint64)
    numbered = number_repeats(ids, np.array([0, 0, 0, 1, 1, 1, 1]))
    assert len(set(numbered[:3].tolist())) == 3
    assert numbered[[0, 1, 2]].tolist() == numbered[[3, 4, 6]].tolist()
    assert numbered[5] not in numbered[:5]


def test_statistics_count_requests_and_average_offsets() -> None:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 50_000, 200, dtype=np.uint32)
    statistics = SegmentStatistics(1 << 16)
    last = None
    for number in range(9):
        tail = rng.integers(0, 50_000, 50, dtype=np.uint32)
        last = opaque_batch(number, np.concatenate([shared, tail]), np.array([250]), 8)
        statistics.add(last, last.starts)
    assert last is not None
    frequency, offsets = statistics.look_up(last.ids)
    inside = last.starts + last.lengths <= 200
    assert set(frequency[inside].tolist()) == {9}
    assert (offsets[inside] == last.starts[inside]).all()
    assert set(frequency[last.starts >= 200].tolist()) == {1}


def test_ragged_counts_each_run_from_its_own_start() -> None:
    assert ragged(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
