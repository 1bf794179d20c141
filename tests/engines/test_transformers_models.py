"""Kinds of models: a loaded prefix is what the model would have kept, and what is not KV per token is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv.cache import Cache, Chain
from tierkv.errors import InvalidRequest

transformers = pytest.importorskip("transformers")
pytest.importorskip("tierkv.engines.transformers")

from tests.engines.tiny import BLOCK, LLAMA, WINDOW, build, prompt, run, stepper  # noqa: E402
from tierkv.engines.transformers import load_prefix, spec_for  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = {**LLAMA, "sliding_window": WINDOW}
HEADS = {**LLAMA, "head_dim": 16}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
SHARED_KV = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 5,
}
OPT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "init_std": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "llama4, chunked": (
        "Llama4TextConfig",
        {**HEADS, **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 40},
    ),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen2, window in some layers": ("Qwen2Config", {**WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral, window": ("MistralConfig", {**WINDOWED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**HEADS, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {**LLAMA, **EXPERTS}),
    "gemma": ("GemmaConfig", HEADS),
    "gemma2": ("Gemma2Config", {**WINDOWED, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {**WINDOWED, "head_dim": 16, "num_hidden_layers": 6}),
    "gemma3n, layers that share": ("Gemma3nTextConfig", {**WINDOWED, "head_dim": 16, **SHARED_KV}),
    "phi": ("PhiConfig", LLAMA),
    "phi3, window": ("Phi3Config", WINDOWED),
    "gpt-neox": ("GPTNeoXConfig", NEOX),
    "olmo2": ("Olmo2Config", LLAMA),
    "olmo3, window": ("Olmo3Config", {**WINDOWED, "num_hidden_layers": 4}),
    "granite": ("GraniteConfig", LLAMA),
    "cohere2": ("Cohere2Config", {**WINDOWED, "head_dim": 16, "num_hidden_layers": 4}),
    "starcoder2, window": ("Starcoder2Config", WINDOWED),
    "gpt-oss, sinks": ("GptOssConfig", {**WINDOWED, "head_dim": 16, **EXPERTS, "rope_scaling": None}),
    "opt, learned positions": ("OPTConfig", OPT),
}
STATEFUL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mamba": ("MambaConfig", {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}),
    "recurrent gemma": ("RecurrentGemmaConfig", {n: v for n, v in LLAMA.items() if n != "initializer_range"}),
    "falcon h1": ("FalconH1Config", LLAMA),
    "t5": ("T5Config", {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}),
    "bert": (
        "BertConfig",
        {n: LLAMA[n] for n in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_loaded_prefix_is_as_if_computed(name: str, cache: Cache, tmp_path: Path) -> None:
    """Against the cache object that transformers makes: logits and what it keeps, to the bit, beyond the window."""
    kind, fields = DECODERS[name]
    model, spec = setup = build(getattr(transformers, kind)(**fields), tmp_path)
    tokens = prompt(9 * BLOCK)
    plain, cold, warm = run(setup, None, tokens), run(setup, cache, tokens), run(setup, cache, tokens)
    assert plain.tokens == cold.tokens == warm.tokens
    assert (cold.errors, warm.errors, warm.reused_tokens) == ((), (), 8 * BLOCK)

    step, own = stepper(model), transformers.DynamicCache(config=model.config)
    for start in range(0, 6 * BLOCK, BLOCK):
        step(tokens[start : start + BLOCK], own)
    with cache.acquire(Chain.of(spec, tokens), max_blocks=6) as lease:
        loaded, length = load_prefix(model, spec, lease)
    assert length == loaded.get_seq_length() == 6 * BLOCK
    for start in range(6 * BLOCK, 9 * BLOCK, BLOCK):
        assert torch.equal(step(tokens[start : start + BLOCK], loaded), step(tokens[start : start + BLOCK], own))
    for mine, theirs in zip(loaded.layers, own.layers, strict=True):
        if theirs.keys is not None:
            kept = theirs.keys.shape[-2]
            assert torch.equal(mine.keys[:, :, -kept:], theirs.keys)
            assert torch.equal(mine.values[:, :, -kept:], theirs.values)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_is_not_kv_per_token_is_refused(name: str, tmp_path: Path) -> None:
    kind, fields = STATEFUL[name]
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(getattr(transformers, kind)(**fields)).eval()
    with pytest.raises(InvalidRequest, match=rf"{type(model).__name__} keeps .* not KV per token"):
        spec_for(model, tmp_path)


def shorter_window(config: dict[str, Any]) -> None:
    config["sliding_window"] = WINDOW // 2


def fewer_heads(config: dict[str, Any]) -> None:
    config["num_key_value_heads"] = 1


@pytest.mark.parametrize("change", [shorter_window, fewer_heads])
def test_a_checkpoint_of_another_model_is_refused(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    model, _ = build(transformers.MistralConfig(**WINDOWED), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="layer 0 keeps"):
        spec_for(model, tmp_path)
