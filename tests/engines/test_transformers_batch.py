"""Batches: rows of different lengths with different prefixes give what the same batch gives without a cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv.cache import Cache, Chain, WriteLease
from tierkv.errors import InvalidRequest, Unavailable

transformers = pytest.importorskip("transformers")
pytest.importorskip("tierkv.engines.transformers")

from tests.engines.conftest import FaultyCache  # noqa: E402
from tests.engines.tiny import BLOCK, Setup, blocks, gemma, llama, prompt, run, stepper  # noqa: E402
from tierkv.engines.transformers import generate_batch, join_rows, load_prefix, new_cache, store_block  # noqa: E402
from tierkv.engines.transformers.forward import Forward  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [
    prompt(9 * BLOCK + 5, seed=1),
    prompt(2 * BLOCK, seed=2),
    [*prompt(9 * BLOCK + 5, seed=1)[: 5 * BLOCK], *prompt(30, seed=3)],
    prompt(3, seed=4),
]
"""Longer and shorter than a window, than a block, and two that share five blocks."""


@pytest.fixture(scope="module", params=[llama, gemma], ids=["llama", "windows"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    made: Setup = request.param(tmp_path_factory.mktemp("model"))
    return made


def batch(setup: Setup, cache: Cache | None, prompts: list[list[int]], new: int = 20, **options: Any) -> Any:
    model, spec = setup
    if cache is not None:
        cache.register(spec)
    return generate_batch(model, cache, spec, prompts, new, chunk_tokens=BLOCK, **options)


def test_a_batch_gives_the_same_tokens_with_a_cache(setup: Setup, cache: Cache) -> None:
    plain, cold, warm = (batch(setup, used, PROMPTS) for used in (None, cache, cache))
    assert [row.tokens for row in plain] == [row.tokens for row in cold] == [row.tokens for row in warm]
    assert len({row.tokens for row in plain}) == len(PROMPTS)
    assert [row.reused_tokens for row in plain] == [0, 0, 0, 0]
    assert [row.reused_tokens for row in cold] == [0, 0, 5 * BLOCK, 0], "the third shares five blocks with the first"
    assert [row.reused_tokens for row in warm] == [9 * BLOCK, BLOCK, 6 * BLOCK, 0]
    assert all(row.errors == () for row in (*cold, *warm))
    assert sum(cache.stats()["leases"].values()) == 0


class SlowToStore(FaultyCache):
    """Takes its time over every reservation."""

    def reserve(self, chain: Chain, **options: Any) -> WriteLease:
        threading.Event().wait(0.2)
        return super().reserve(chain, **options)


def test_a_prefix_that_rows_share_is_computed_once(setup: Setup, cache: Cache) -> None:
    """Nothing is asked for before the rows above are stored, however long that takes."""
    rows = batch(setup, SlowToStore(cache), [PROMPTS[0], PROMPTS[2]], new=1, compute_s=0.0)
    assert [row.reused_tokens for row in rows] == [0, 5 * BLOCK]


def test_a_row_of_a_batch_answers_as_it_does_alone(setup: Setup) -> None:
    rows = batch(setup, None, PROMPTS)
    assert [row.tokens for row in rows] == [run(setup, None, tokens, 20).tokens for tokens in PROMPTS]


def test_what_a_batch_stores_is_what_one_prompt_would_have_stored(setup: Setup, cache: Cache) -> None:
    _, spec = setup
    batch(setup, cache, PROMPTS, new=1)
    stored = [blocks(cache, spec, tokens) for tokens in PROMPTS]
    cache.clear(spec.namespace)
    for tokens, mine in zip(PROMPTS, stored, strict=True):
        run(setup, cache, tokens, 1)
        assert blocks(cache, spec, tokens) == mine


def test_the_next_turns_reuse_all_answers(setup: Setup, cache: Cache) -> None:
    first = batch(setup, cache, PROMPTS)
    turns = [[*tokens, *row.tokens, *prompt(20)] for tokens, row in zip(PROMPTS, first, strict=True)]
    second = batch(setup, cache, turns)
    known = [(len(tokens) + len(row.tokens) - 1) // BLOCK * BLOCK for tokens, row in zip(PROMPTS, first, strict=True)]
    assert [row.reused_tokens for row in second] == known
    assert [row.tokens for row in second] == [row.tokens for row in batch(setup, None, turns)]


def test_answers_end_each_at_its_own_token(setup: Setup, cache: Cache) -> None:
    model, _ = setup
    free = batch(setup, None, PROMPTS, new=8)
    ends = {free[0].tokens[2], free[1].tokens[5]}
    model.generation_config.eos_token_id = sorted(ends)
    try:
        rows = batch(setup, cache, PROMPTS, new=8)
    finally:
        model.generation_config.eos_token_id = None
    for row, whole in zip(rows, free, strict=True):
        length = next((n + 1 for n, token in enumerate(whole.tokens) if token in ends), 8)
        assert row.tokens == whole.tokens[:length]
    assert len({len(row.tokens) for row in rows}) > 1


def test_a_salted_row_shares_with_its_own_kind_only(setup: Setup, cache: Cache) -> None:
    tokens = prompt(4 * BLOCK)
    keys = [None, {0: b"salt"}, {0: b"salt"}, {0: b"pepper"}]
    rows = batch(setup, cache, [tokens] * 4, new=2, extra_keys=keys)
    assert [row.reused_tokens for row in rows] == [0, 0, 3 * BLOCK, 0]


def test_each_row_belongs_to_its_session(setup: Setup, cache: Cache) -> None:
    batch(setup, cache, PROMPTS[:2], new=1, sessions=["one", "two"])
    assert cache.end_session(setup[1].namespace, "two") == len(PROMPTS[1]) // BLOCK * len(setup[1].groups)
    assert cache.end_session(setup[1].namespace, "three") == 0


def test_a_cache_that_fails_costs_no_answer(setup: Setup, faulty: Any) -> None:
    faulty.fail["acquire"] = Unavailable("the daemon is gone")
    rows = batch(setup, faulty, PROMPTS)
    assert [row.tokens for row in rows] == [row.tokens for row in batch(setup, None, PROMPTS)]
    assert all(row.errors == ("unavailable",) for row in rows)


@pytest.mark.parametrize("wrong", [{"prompts": []}, {"prompts": [[3], []]}])
def test_impossible_batches_are_refused(setup: Setup, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        batch(setup, None, **wrong)


def test_joined_rows_can_be_stored_from_where_they_lie(setup: Setup, cache: Cache, tmp_path: Path) -> None:
    model, spec = setup
    cache.register(spec)
    tokens = [prompt(4 * BLOCK, seed=5), prompt(2 * BLOCK + 3, seed=6)]
    pasts = []
    for row in tokens:
        past = new_cache(model)
        for start in range(0, len(row), BLOCK):
            stepper(model)(row[start : start + BLOCK], past)
        pasts.append(past)
    joined = join_rows(model, pasts)
    assert joined.padding == (0, 2 * BLOCK - 3)
    assert joined.mask.sum(1).tolist() == [len(row) for row in tokens]
    for number, row in enumerate(tokens):
        with cache.reserve(Chain.of(spec, row)) as lease:
            for index in range(len(row) // BLOCK):
                store_block(spec, joined.cache, lease, index, row=number, padding=joined.padding[number])
    stored = [blocks(cache, spec, row) for row in tokens]
    cache.clear(spec.namespace)
    for row, mine in zip(tokens, stored, strict=True):
        run(setup, cache, row, 1)
        assert blocks(cache, spec, row) == mine


def test_rows_without_their_beginning_are_not_joined(tmp_path: Path) -> None:
    model, _ = gemma(tmp_path)
    own = transformers.DynamicCache(config=model.config)
    stepper(model)(prompt(100), own)
    with pytest.raises(InvalidRequest, match="new_cache"):
        join_rows(model, [own, new_cache(model)])


def test_models_without_positions_are_decoded_one_by_one(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = setup
    inner = type(model).forward

    def forward(self: Any, input_ids: Any = None, cache: Any = None, past_key_values: Any = None, **other: Any) -> Any:
        return inner(self, input_ids=input_ids, **other)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(InvalidRequest, match="position_ids"):
        batch(setup, None, PROMPTS)


def test_padding_is_never_looked_at(setup: Setup) -> None:
    """Logits of a padded row, up to rounding, are those of the row alone."""
    model, _ = setup
    tokens = [prompt(70, seed=7), prompt(20, seed=8)]
    pasts = [new_cache(model), new_cache(model)]
    for row, past in zip(tokens, pasts, strict=True):
        stepper(model)(row, past)
    joined = join_rows(model, pasts, room=1)
    alone = [stepper(model)([11], past)[0, -1] for past in pasts]
    total = joined.cache.get_seq_length()
    with torch.inference_mode():
        ids = torch.tensor([[11], [11]])
        together = Forward(model)(
            ids, joined.cache, mask=joined.mask[:, : total + 1], positions=joined.positions(total)
        )
    for number in (0, 1):
        torch.testing.assert_close(together[number], alone[number], rtol=1e-4, atol=1e-4)


def test_joined_windows_remember_what_was_never_loaded(tmp_path: Path, cache: Cache) -> None:
    model, spec = setup = gemma(tmp_path)
    tokens = prompt(150)
    run(setup, cache, tokens)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        loaded, length = load_prefix(model, spec, lease)
    longer = new_cache(model)
    stepper(model)(prompt(length + 7), longer)
    joined = join_rows(model, [loaded, longer])
    assert [getattr(layer, "absent", 0) for layer in joined.cache.layers] == [6 * BLOCK + 7, 0, 6 * BLOCK + 7]
