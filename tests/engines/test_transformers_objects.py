"""Cache objects with room: to the model they are transformers' own, whatever is done with them in between."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.cache import Cache, Chain
from tierkv.errors import InvalidRequest, SpecMismatch
from tierkv.spec import KVGroup

transformers = pytest.importorskip("transformers")
pytest.importorskip("tierkv.engines.transformers")

from tests.engines.tiny import BLOCK, WINDOW, blocks, gemma, llama, prompt, run, stepper  # noqa: E402
from tierkv.engines.transformers import load_prefix, new_cache, store_block  # noqa: E402
from tierkv.engines.transformers.layers import RoomyLayer, RoomySlidingLayer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LayerPair = tuple[Any, Any]


def pair(sliding: bool, room: int) -> LayerPair:
    """Return a layer of ours and one of theirs."""
    theirs = transformers.cache_utils
    if sliding:
        return RoomySlidingLayer(5, room), theirs.DynamicSlidingWindowLayer(5)
    return RoomyLayer(room), theirs.DynamicLayer()


def append(layers: LayerPair, tokens: int) -> None:
    """Append the same random tokens to both and compare what the model sees."""
    keys, values = torch.randn(2, 3, 2, tokens, 4)
    # transformers 4 passes the tokens' places, 5 their number.
    places = "cache_position" in inspect.signature(layers[1].get_mask_sizes).parameters
    asked = torch.arange(tokens) if places else tokens
    assert layers[0].get_mask_sizes(asked) == layers[1].get_mask_sizes(asked)
    mine, theirs = (layer.update(keys, values) for layer in layers)
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))
    assert layers[0].get_seq_length() == layers[1].get_seq_length()


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_model_sees_what_transformers_would_show(sliding: bool, room: int, steps: list[int]) -> None:
    layers = pair(sliding, room)
    for tokens in steps:
        append(layers, tokens)


@pytest.mark.parametrize("sliding", [False, True])
def test_rows_can_be_reordered_repeated_and_chosen(sliding: bool) -> None:
    layers = pair(sliding, 20)
    append(layers, 4)
    for layer in layers:
        layer.reorder_cache(torch.tensor([2, 0, 1]))
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([5, 0, 3]))
    append(layers, 3)
    append(layers, 1)


def test_nothing_is_moved_while_there_is_room() -> None:
    layer = RoomyLayer(12)
    places = set()
    for tokens in (7, 1, 4):
        layer.update(*torch.randn(2, 1, 2, tokens, 4))
        assert layer.keys is not None
        places.add(layer.keys.data_ptr())
    assert len(places) == 1
    layer.update(*torch.randn(2, 1, 2, 1, 4))
    assert layer.keys.data_ptr() not in places


def crop(past: Any, tokens: int) -> None:
    """Remove the last tokens."""
    past.crop(-tokens)


def test_a_cropped_prefix_goes_on_from_where_it_was_cropped(tmp_path: Path, cache: Cache) -> None:
    model, spec = setup = llama(tmp_path)
    tokens = prompt(6 * BLOCK)
    run(setup, cache, tokens)
    step = stepper(model)
    past = new_cache(model)
    step(tokens[: 2 * BLOCK], past)
    with cache.acquire(Chain.of(spec, tokens), max_blocks=4) as lease:
        loaded, _ = load_prefix(model, spec, lease, room=100)
    crop(loaded, 2 * BLOCK)
    other = prompt(BLOCK, seed=9)
    torch.testing.assert_close(step(other, loaded), step(other, past))


def test_a_window_cannot_be_cropped_to_where_nothing_was_loaded(tmp_path: Path, cache: Cache) -> None:
    model, spec = setup = gemma(tmp_path)
    tokens = prompt(150)
    run(setup, cache, tokens)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        loaded, length = load_prefix(model, spec, lease)
    assert loaded.layers[0].absent == 6 * BLOCK
    crop(loaded, length - (6 * BLOCK + WINDOW - 1))
    stepper(model)(tokens[:1], loaded)
    crop(loaded, 2)
    with pytest.raises(InvalidRequest, match="acquire the shorter prefix"):
        stepper(model)(tokens[:1], loaded)


def test_what_a_layer_without_a_window_looks_at_may_not_be_absent(tmp_path: Path, cache: Cache) -> None:
    """A spec by hand that takes a full layer for one with a window would leave holes in it."""
    model, right = llama(tmp_path)
    spec = replace(right, groups=(KVGroup((0, 1, 2), "sliding_window", 2, 16, WINDOW),))
    tokens = prompt(150)
    run((model, spec), cache, tokens)
    with cache.acquire(Chain.of(spec, tokens)) as lease, pytest.raises(SpecMismatch, match="layer 0"):
        load_prefix(model, spec, lease)
    again = run((model, spec), cache, tokens)
    assert (again.errors, again.reused_tokens) == (("spec-mismatch",), 0)
    assert again.tokens == run((model, right), None, tokens).tokens


def test_blocks_that_a_cache_object_has_dropped_are_not_stored(tmp_path: Path, cache: Cache) -> None:
    """transformers' own windows forget; what they still hold is stored from where it really lies."""
    model, spec = setup = gemma(tmp_path)
    tokens = prompt(6 * BLOCK)
    cache.register(spec)
    own = transformers.DynamicCache(config=model.config)
    for start in range(0, len(tokens), BLOCK):
        stepper(model)(tokens[start : start + BLOCK], own)
    with cache.reserve(Chain.of(spec, tokens)) as lease:
        with pytest.raises(SpecMismatch, match="block 3"):
            store_block(spec, own, lease, 3)
        for index in (4, 5):
            store_block(spec, own, lease, index)
    run(setup, cache, tokens)
    mine = new_cache(model)
    for start in range(0, len(tokens), BLOCK):
        stepper(model)(tokens[start : start + BLOCK], mine)
    found = blocks(cache, spec, tokens)
    planes = mine.layers[0].keys[0, :, 4 * BLOCK : 5 * BLOCK].numpy().tobytes()
    assert found[4, 1][: len(planes)] == planes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, cache: Cache, dtype: torch.dtype) -> None:
    model, spec = setup = llama(tmp_path, dtype)
    tokens = prompt(5 * BLOCK)
    first, second = run(setup, cache, tokens), run(setup, cache, tokens)
    assert (first.errors, second.errors, first.tokens) == ((), (), second.tokens)
    computed = new_cache(model)
    for start in range(0, 5 * BLOCK, BLOCK):
        stepper(model)(tokens[start : start + BLOCK], computed)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        loaded, _ = load_prefix(model, spec, lease)
    for mine, theirs in zip(loaded.layers, computed.layers, strict=True):
        assert mine.keys.dtype == dtype
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
