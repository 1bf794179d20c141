"""Two turns of a conversation, and a batch, with a model that any path to a checkpoint can replace.

    python docs/examples/transformers_reuse.py [CHECKPOINT]

Without a checkpoint a tiny model with random weights is made, which answers nonsense.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig

import tierkv
from tierkv.engines.transformers import generate, generate_batch, spec_for


def make_tiny_checkpoint(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


with tempfile.TemporaryDirectory() as home:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny_checkpoint(Path(home))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    spec = spec_for(model, path, block_tokens=16)

    with tierkv.open({"warm": {"capacity": "256MiB"}}) as cache:  # or tierkv.connect() to a daemon
        cache.register(spec)

        prompt = [3 + token % 500 for token in range(200)]
        first = generate(model, cache, spec, prompt, 20, session="chat-17")
        print(f"first turn: {first.reused_tokens} of {first.prompt_tokens} prompt tokens reused")

        prompt = [*prompt, *first.tokens, 7, 8, 9]
        second = generate(model, cache, spec, prompt, 20, session="chat-17")
        print(f"second turn: {second.reused_tokens} of {second.prompt_tokens} prompt tokens reused")

        questions = [[*prompt, 10, 11], prompt[:100], [1, 2, 3]]
        answers = generate_batch(model, cache, spec, questions, 5)
        print(f"batch: {[answer.reused_tokens for answer in answers]} tokens reused")
