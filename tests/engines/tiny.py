"""Tiny random models, and what the tests of the transformers adapter do with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tierkv.cache import Cache, Chain
from tierkv.engines.transformers import generate, spec_for
from tierkv.spec import KVSpec

BLOCK = 16
WINDOW = 40
LLAMA: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
"""Fields of a Llama-style configuration. Weights are large, so that answers are not one token over and over."""

Setup = tuple[Any, KVSpec]


def build(config: Any, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Setup:
    """Make a model with fixed random weights and its spec; the checkpoint goes to `path`."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(path)
    return model, spec_for(model, path, block_tokens=BLOCK, **options)


def llama(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Setup:
    return build(transformers.LlamaConfig(**LLAMA), path, dtype, **options)


def gemma(path: Path) -> Setup:
    """Make a model whose first and last layer have a window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **LLAMA, head_dim=16, layer_types=kinds, sliding_window=WINDOW, tie_word_embeddings=False
    )
    return build(config, path)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(setup: Setup, cache: Cache | None, tokens: list[int], new: int = 6, **options: Any) -> Any:
    model, spec = setup
    if cache is not None:
        cache.register(spec)
    return generate(model, cache, spec, tokens, new, chunk_tokens=BLOCK, **options)


def stepper(model: Any) -> Callable[[list[int], Any], torch.Tensor]:
    """Return a function that appends tokens to a cache object and returns their logits, by transformers alone."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    def step(tokens: list[int], past: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=True, **{name: past}).logits
        return logits

    return step


def blocks(cache: Cache, spec: KVSpec, tokens: list[int]) -> dict[tuple[int, int], bytes]:
    """Return the bytes of all blocks of a prompt, by index and group."""
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        return {(ref.index, ref.group): bytes(lease.view(ref.index, ref.group)) for ref in lease.blocks}
