"""The transformers adapter, on tiny random models: reused KV changes nothing but the time it takes."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv.cache import Cache, Chain
from tierkv.errors import InvalidRequest, LeaseLost, StorageError, TierFull, TierKVError, Unavailable
from tierkv.spec import KVGroup, KVSpec

transformers = pytest.importorskip("transformers")
adapter = pytest.importorskip("tierkv.engines.transformers")

BLOCK = 16
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, KVSpec]:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(path)
    return model, adapter.spec_for(model, path, block_tokens=BLOCK)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, KVSpec]:
    config = transformers.LlamaConfig(num_hidden_layers=3, initializer_range=0.3, **COMMON)
    return build(config, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, KVSpec]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=3,
        layer_types=kinds,
        sliding_window=40,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **COMMON,
    )
    return build(config, tmp_path_factory.mktemp("gemma"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(setup: tuple[Any, KVSpec], cache: Any, tokens: list[int], new: int = 6, **options: Any) -> Any:
    model, spec = setup
    if cache is not None:
        cache.register(spec)
    return adapter.generate(model, cache, spec, tokens, new, chunk_tokens=2 * BLOCK, **options)


def leases(cache: Cache) -> int:
    return sum(cache.stats()["leases"].values())


def published(cache: Cache) -> int:
    found: int = cache.stats()["published_blocks"]
    return found


def test_a_reused_prefix_gives_the_same_tokens(llama: Any, cache: Cache) -> None:
    tokens = prompt(150)
    plain, cold, warm = run(llama, None, tokens), run(llama, cache, tokens), run(llama, cache, tokens)
    assert plain.tokens == cold.tokens == warm.tokens
    assert len(set(plain.tokens)) > 1
    assert (plain.reused_tokens, cold.reused_tokens, warm.reused_tokens) == (0, 0, 144)
    assert (plain.stored_blocks, cold.stored_blocks, warm.stored_blocks) == (0, 9, 0)
    assert warm.tokens_by_tier == {"warm": 144}
    assert warm.prefilled_tokens == 6
    assert warm.errors == ()
    assert leases(cache) == 0


def test_the_receipt_adds_up(llama: Any, cache: Cache) -> None:
    tokens = prompt(150, seed=9)
    cold, warm = run(llama, cache, tokens), run(llama, cache, tokens)
    told = cold.usage.to_anthropic()
    assert (told["cache_read_input_tokens"], told["cache_creation_input_tokens"], told["input_tokens"]) == (0, 144, 6)
    assert told["output_tokens"] == len(cold.tokens)
    assert warm.usage.to_openai()["prompt_tokens_details"] == {"cached_tokens": 144}
    assert (warm.usage.created_tokens, warm.usage.cached_tokens_by_tier) == (0, {"warm": 144})
    turn = [*tokens, *warm.tokens, *prompt(40, seed=3)]
    usage = run(llama, cache, turn, store_generated=True).usage
    stored = len(turn) // BLOCK * BLOCK
    assert usage.cached_tokens + usage.created_tokens == stored, "and not the answer's blocks, which are stored, too"


def test_logits_after_a_loaded_prefix_are_identical_to_the_bit(llama: Any, cache: Cache) -> None:
    model, spec = llama
    tokens = prompt(4 * BLOCK)
    run(llama, cache, tokens)
    ids = torch.tensor([tokens])
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    whole = transformers.DynamicCache()
    with torch.inference_mode(), cache.acquire(Chain.of(spec, tokens), max_blocks=2) as lease:
        for start in range(0, len(tokens), 2 * BLOCK):
            expected = model(ids[:, start : start + 2 * BLOCK], use_cache=True, **{name: whole}).logits
        loaded, length = adapter.load_prefix(model, spec, lease)
        assert length == 2 * BLOCK == loaded.get_seq_length()
        found = model(ids[:, length:], use_cache=True, **{name: loaded}).logits
    assert torch.equal(found, expected)
    for mine, theirs in zip(loaded.layers, whole.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def test_bfloat16_passes_through_unchanged(cache: Cache, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, initializer_range=0.3, **COMMON)
    setup = build(config, tmp_path, torch.bfloat16)
    assert setup[1].dtype == "bfloat16"
    tokens = prompt(70)
    assert run(setup, cache, tokens).tokens == run(setup, cache, tokens).tokens
    with cache.acquire(Chain.of(setup[1], tokens)) as lease:
        loaded, _ = adapter.load_prefix(setup[0], setup[1], lease)
    assert loaded.layers[0].keys.dtype == torch.bfloat16


def test_the_last_token_is_always_computed(llama: Any, cache: Cache) -> None:
    tokens = prompt(3 * BLOCK)
    run(llama, cache, tokens)
    again = run(llama, cache, tokens)
    assert (again.reused_tokens, again.prefilled_tokens) == (2 * BLOCK, BLOCK)


def test_branches_share_their_common_blocks(llama: Any, cache: Cache) -> None:
    common = prompt(5 * BLOCK)
    left, right = common + prompt(40, seed=1), common + prompt(40, seed=2)
    run(llama, cache, left)
    before = published(cache)
    branch = run(llama, cache, right)
    assert branch.reused_tokens == len(common)
    assert branch.tokens == run(llama, None, right).tokens
    assert published(cache) - before == len(right) // BLOCK - 5


@pytest.mark.parametrize(("kept", "reused"), [(True, 4 * BLOCK), (False, 3 * BLOCK)])
def test_the_next_turn_reuses_the_answer_if_it_was_stored(llama: Any, cache: Cache, kept: bool, reused: int) -> None:
    tokens = prompt(3 * BLOCK + 4)
    first = run(llama, cache, tokens, new=20, store_generated=kept)
    turn = [*tokens, *first.tokens, *prompt(20, seed=3)]
    second = run(llama, cache, turn)
    assert second.reused_tokens == reused
    assert second.tokens == run(llama, None, turn).tokens


def test_an_answer_ends_at_the_end_of_sequence_token(llama: Any) -> None:
    model, _ = llama
    tokens = prompt(20)
    free = run(llama, None, tokens, new=8).tokens
    model.generation_config.eos_token_id = [free[2]]
    try:
        assert run(llama, None, tokens, new=8).tokens == free[: free.index(free[2]) + 1]
    finally:
        model.generation_config.eos_token_id = None


def test_blocks_are_visible_while_prefill_goes_on(llama: Any, faulty: Any) -> None:
    model, spec = llama
    tokens = prompt(6 * BLOCK + 3)
    committed = threading.Event()
    faulty.committed = committed.set
    seen: list[int] = []

    def before_forward(module: Any, args: Any, kwargs: Any) -> None:
        past = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]
        if past.get_seq_length() == 6 * BLOCK:
            assert committed.wait(30)
            seen.append(faulty.lookup(Chain.of(spec, tokens)).blocks)

    hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        run(llama, faulty, tokens, new=1)
    finally:
        hook.remove()
    assert len(seen) == 1
    assert seen[0] >= 1


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("acquire", Unavailable("the daemon is gone")),
        ("reserve", TierFull("every slot is leased")),
        ("renew", LeaseLost("the lease expired")),
        ("buffer", LeaseLost("the lease expired")),
        ("commit", StorageError("the disk refuses")),
    ],
)
def test_an_error_of_the_cache_is_a_miss(llama: Any, faulty: Any, method: str, error: TierKVError) -> None:
    tokens = prompt(100)
    faulty.fail[method] = error
    if method == "acquire":
        run(llama, faulty.inner, tokens)
    result = run(llama, faulty, tokens)
    assert result.tokens == run(llama, None, tokens).tokens
    assert result.errors == (error.slug,)
    assert result.reused_tokens == 0
    assert leases(faulty) == 0


def test_a_closed_cache_is_a_miss(llama: Any, cache: Cache) -> None:
    tokens = prompt(40)
    cache.register(llama[1])
    cache.close()
    result = adapter.generate(*llama[:1], cache, llama[1], tokens, 6, chunk_tokens=2 * BLOCK)
    assert result.tokens == run(llama, None, tokens).tokens
    assert set(result.errors) == {"unavailable"}


def test_a_corrupt_block_costs_only_what_follows_it_and_is_stored_again(
    llama: Any, cache: Cache, tmp_path: Path
) -> None:
    _, spec = llama
    tokens = prompt(100)
    run(llama, cache, tokens)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        damaged = lease.blocks[3]
    (memory,) = tmp_path.glob("*.warm")
    with memory.open("r+b") as file:
        file.seek(damaged.offset + damaged.length // 2)
        file.write(b"rot")
    second = run(llama, cache, tokens)
    assert second.errors == ("corrupt-block",)
    assert second.reused_tokens == 3 * BLOCK == sum(second.tokens_by_tier.values())
    third = run(llama, cache, tokens)
    assert third.errors == ()
    assert third.reused_tokens == 6 * BLOCK
    assert second.tokens == third.tokens == run(llama, None, tokens).tokens


def test_blocks_without_room_are_not_stored(llama: Any, small_cache: Cache) -> None:
    _, spec = llama
    with ExitStack() as pinned:
        for seed in range(3):
            tokens = prompt(480, seed=seed)
            last = run(llama, small_cache, tokens, new=1, wait_s=0.0)
            pinned.enter_context(small_cache.acquire(Chain.of(spec, tokens)))
        assert last.stored_blocks < 30
        assert last.errors == ()
        again = run(llama, small_cache, tokens, new=1, wait_s=0.0)
        assert again.reused_tokens == last.stored_blocks * BLOCK
        assert again.tokens == last.tokens


def test_a_spec_of_another_model_is_counted_and_stores_nothing(llama: Any, cache: Cache) -> None:
    model, spec = llama
    wrong = dataclasses.replace(spec, groups=(KVGroup((0, 1, 2), "full", 1, 16),))
    result = run((model, wrong), cache, prompt(40))
    assert result.errors == ("spec-mismatch",)
    assert published(cache) == leases(cache) == 0


def test_a_fault_that_is_not_the_caches_is_raised(llama: Any, faulty: Any) -> None:
    faulty.fail["commit"] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run(llama, faulty, prompt(40))
    assert leases(faulty) == 0


def test_layers_with_a_window_are_a_group_of_their_own(gemma: Any, cache: Cache) -> None:
    _, spec = gemma
    assert [(g.layers, g.kind, g.window) for g in spec.groups] == [
        ((1,), "full", 0),
        ((0, 2), "sliding_window", 40),
    ]
    tokens = prompt(150)
    plain, cold, warm = run(gemma, None, tokens), run(gemma, cache, tokens), run(gemma, cache, tokens)
    assert warm.reused_tokens == 144
    assert len(set(plain.tokens)) > 1
    assert plain.tokens == cold.tokens == warm.tokens


def test_blocks_before_the_window_are_not_needed(gemma: Any, cache: Cache) -> None:
    model, spec = gemma
    tokens = prompt(150)
    run(gemma, cache, tokens)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        held = {group: [ref.index for ref in lease.blocks if ref.group == group] for group in (0, 1)}
        loaded, length = adapter.load_prefix(model, spec, lease)
    assert held == {0: [0, 1, 2, 3, 4, 5, 6, 7, 8], 1: [6, 7, 8]}
    assert length == 9 * BLOCK
    assert not loaded.layers[0].keys[:, :, : 6 * BLOCK].any()
    assert loaded.layers[0].keys[:, :, 6 * BLOCK :].any()


@pytest.mark.parametrize(
    ("tokens", "new", "chunk"), [([], 1, BLOCK), ([3], 0, BLOCK), ([3], 1, BLOCK + 1), ([3], 1, 0)]
)
def test_impossible_arguments_are_refused(llama: Any, tokens: list[int], new: int, chunk: int) -> None:
    with pytest.raises(InvalidRequest):
        adapter.generate(*llama[:1], None, llama[1], tokens, new, chunk_tokens=chunk)


def test_a_spec_follows_the_model_as_it_runs(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1, **COMMON)
    model, spec = build(config, tmp_path)
    assert (spec.order, spec.dtype, spec.groups) == ("HND", "float32", (KVGroup((0,), "full", 2, 16),))
    model.set_attn_implementation("eager")
    eager = adapter.spec_for(model, tmp_path, block_tokens=BLOCK)
    half = adapter.spec_for(model.to(torch.float16), tmp_path, block_tokens=BLOCK)
    tuned = adapter.spec_for(model, tmp_path, block_tokens=BLOCK, adapter="tuned-3")
    assert len({spec.namespace, eager.namespace, half.namespace, tuned.namespace}) == 4


def test_an_adapter_needs_an_id(llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, _ = llama
    monkeypatch.setattr(model, "peft_config", {"default": object()}, raising=False)
    with pytest.raises(InvalidRequest, match="adapter"):
        adapter.spec_for(model, tmp_path)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    moe = {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = transformers.DeepseekV2Config(num_hidden_layers=1, **sizes, **moe, **common)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="latent"):
        adapter.spec_for(model, tmp_path)
