"""tierkv in a loop of your own: load a prefix, compute the rest, store each block as soon as it is complete."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import tierkv
from tierkv.cache import Cache, Chain
from tierkv.engines.transformers import load_prefix, new_cache, spec_for, store_block
from tierkv.spec import KVSpec

CHUNK_TOKENS = 64


@torch.inference_mode()
def first_token(model: torch.nn.Module, cache: Cache, spec: KVSpec, tokens: list[int]) -> tuple[int, int]:
    """Return the token that follows a prompt, and how much of the prompt was computed."""
    chain = Chain.of(spec, tokens)
    most = (len(tokens) - 1) // spec.block_tokens  # the last token must be computed: it says what comes next
    with cache.acquire(chain, wait_s=1.0, max_blocks=most, compute_s=5.0) as read:
        past, known = load_prefix(model, spec, read, room=len(tokens)) if read.hit_blocks else (new_cache(model), 0)
    with cache.reserve(chain, start=known // spec.block_tokens) as write:
        free = {grant.index for grant in write.granted}
        for start in range(known, len(tokens), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(tokens))
            # `cache` is called `past_key_values` before transformers 5
            output = model(input_ids=torch.tensor([tokens[start:stop]]), cache=past, use_cache=True)
            for index in range(start // spec.block_tokens, stop // spec.block_tokens):
                if index in free:
                    store_block(spec, past, write, index)
    if read.compute:
        read.compute.release()
    return int(output.logits[0, -1].argmax()), len(tokens) - known


with tempfile.TemporaryDirectory() as path:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    spec = spec_for(model, Path(path), block_tokens=16)
    with tierkv.open({"warm": {"capacity": "256MiB"}}) as cache:
        cache.register(spec)
        prompt = [3 + token % 500 for token in range(200)]
        print("computed:", [first_token(model, cache, spec, prompt)[1] for _ in range(2)])
