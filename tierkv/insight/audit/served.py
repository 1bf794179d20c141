"""What an engine hands to an auditor after a hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

    from tierkv.spec import KVSpec

__all__ = ["Served"]


@dataclass(frozen=True, slots=True)
class Served:
    """One answered prompt, and the KV it was answered from. Nothing here is copied, and nothing may change any more.

    Attributes
    ----------
    model, spec
        What answered, and how its KV is described.
    tokens, extra_keys
        The prompt, as in `tierkv.cache.Chain.of`.
    reused_tokens
        So many tokens at its beginning came from the cache.
    chunk_tokens
        The step of its prefill.
    steady
        Whether all its KV is only ever computed in such steps, so that equal prompts have equal bits.
    past, row, padding
        The cache object, the prompt's row in it, and the padding before it.
    logits
        Those of the first token of the answer: ``(vocabulary,)``.
    """

    model: PreTrainedModel
    spec: KVSpec
    tokens: Sequence[int]
    extra_keys: Mapping[int, bytes] | None
    reused_tokens: int
    chunk_tokens: int
    steady: bool
    past: DynamicCache
    row: int
    padding: int
    logits: torch.Tensor
