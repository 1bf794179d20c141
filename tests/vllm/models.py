"""Models for a real engine: small ones made of random numbers, and SmolLM2-135M from a Python package.

All are float32: there a reused prefix cannot change a greedy token, while bfloat16 has ties that even an engine's own
prefix cache tips.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import rmtree

VOCABULARY = 1000
WINDOW = 128


def make_llama(directory: Path, *, seed: int = 0) -> Path:
    """A Llama of three layers; another seed makes other weights of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=_SPREAD,
        eos_token_id=None,
        bos_token_id=None,
    )
    return _save(LlamaForCausalLM, config, directory, seed)


def make_gemma(directory: Path, *, seed: int = 0) -> Path:
    """A Gemma 3 of six layers, of which every sixth sees everything and the others only the last `WINDOW` tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        initializer_range=_SPREAD,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,  # tied and random, it would repeat its last token for ever
    )
    return _save(Gemma3ForCausalLM, config, directory, seed)


def make_adapter(directory: Path, *, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the Llama, strong enough to change its mind."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * _SPREAD
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * _SPREAD
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct as safetensors, made once per user, since reading the GGUF file takes ten seconds."""
    from tierkv.service.demo.model import find_checkpoint, load_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv-tests"
    directory = cache / "smollm2-135m-instruct-float32"
    if not directory.is_dir():
        loaded = load_model(find_checkpoint())
        scratch = cache / f"{directory.name}.{os.getpid()}"
        loaded.model.save_pretrained(scratch)
        loaded.tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(directory)  # whole or not at all
        except OSError:  # somebody else was faster
            rmtree(scratch)
    return directory


# With the usual .02 a random model says the same whatever it is asked; with this its answer depends on every token.
_SPREAD = 0.2


def _save(model_class: type, config: object, directory: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    model.save_pretrained(directory)
    return directory
