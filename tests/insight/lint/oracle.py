"""Slow and simple: what a prefix cache that never evicts finds, counted with sets of tuples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tierkv.insight.lint.sources.segments import Segmenter
from tierkv.insight.lint.text.prompt import Part, Prompt, render
from tierkv.insight.lint.text.tokenise import Approximation

__all__ = ["hit_tokens", "prompts_of"]


def prompts_of(rows: Iterable[Any]) -> list[list[int]]:
    """Return the token ids of a log's rows: those of the approximation where the rows are text."""
    segmenter = Segmenter(Approximation())
    prompts = []
    for row in rows:
        if isinstance(row, list):
            prompts.append(row)
            continue
        prompt = Prompt((Part(row, "the prompt"),)) if isinstance(row, str) else render(row)
        tokens = [slot.segment.tokens for slot in segmenter.slots(prompt)]
        prompts.append(np.concatenate(tokens).tolist())
    return prompts


def hit_tokens(prompts: Iterable[Sequence[int]], block_tokens: int = 16) -> int:
    """Count leading whole blocks that an earlier prompt has in the same place behind the same tokens, in tokens."""
    chains: dict[tuple[int, tuple[int, ...]], int] = {}
    hits = 0
    for prompt in prompts:
        parent, hitting = 0, True
        for begin in range(0, len(prompt) - block_tokens + 1, block_tokens):
            key = (parent, tuple(prompt[begin : begin + block_tokens]))
            hitting = hitting and key in chains
            hits += block_tokens if hitting else 0
            parent = chains.setdefault(key, len(chains) + 1)
    return hits
