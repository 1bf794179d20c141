"""A prompt's KV and logits computed without a cache, in steps of a chosen size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from tierkv.engines.transformers.forward import Forward
from tierkv.engines.transformers.layers import new_cache
from tierkv.insight.audit.result import Plane
from tierkv.insight.audit.ulps import Bits

__all__ = ["Computed", "compute", "logits_of", "other_steps", "plane_bits", "steps"]

_ALONE = 8


@dataclass(frozen=True, slots=True)
class Computed:
    """The cache object after a prefill, and the logits of the token that follows."""

    past: DynamicCache
    logits: NDArray[np.float32]


def compute(
    model: PreTrainedModel, tokens: Sequence[int], ends: Iterator[int], between: Callable[[], None]
) -> Computed:
    """Prefill `tokens` in steps that end at `ends`; call `between` before each. Blocks as long as that takes."""
    forward, past = Forward(model), new_cache(model, room=len(tokens))
    ids = torch.tensor([list(tokens)], device=model.device)
    position = 0
    with torch.inference_mode():
        for end in ends:
            between()
            logits = forward(ids[:, position:end], past)
            position = end
    return Computed(past, logits_of(logits[0]))


def steps(tokens: int, chunk_tokens: int) -> Iterator[int]:
    """Yield where the steps of an engine end that prefills so many tokens at a time."""
    yield from range(chunk_tokens, tokens, chunk_tokens)
    yield tokens


def other_steps(tokens: int, reused: int, chunk_tokens: int) -> Iterator[int]:
    """Yield other steps to the same end: as different in shape as those in which served blocks may have been computed.

    The first token and the last of those reused go alone, as in an answer, and the others in smaller steps than usual.
    """
    yield 1
    position, alone, smaller = 1, max(1, reused - _ALONE), max(1, chunk_tokens * 3 // 8)
    while position < tokens:
        if alone <= position < reused:
            position += 1
        else:
            end = alone if position < alone else tokens
            position = min(end, (position // smaller + 1) * smaller)
        yield position


def plane_bits(
    past: DynamicCache, layer: int, plane: Plane, tokens: int, block_tokens: int, row: int = 0, padding: int = 0
) -> tuple[Bits, int]:
    """Return bits of K or V of a prompt's first `tokens` tokens, and the first token of the first block that is there.

    ``(heads, tokens from the first on, head_dim)`` on the CPU, perhaps a view of the cache object's memory.
    """
    held: Any = past.layers[layer]
    absent = max(0, getattr(held, "absent", 0) - padding)
    first = min(tokens, -(-absent // block_tokens) * block_tokens)
    tensor: torch.Tensor = (held.keys if plane == "K" else held.values)[row, :, padding + first : padding + tokens]
    bits = getattr(torch, f"int{tensor.element_size() * 8}")
    array = tensor.detach().cpu().view(bits).numpy()
    return array.view(array.dtype.str.replace("i", "u")), first


def logits_of(row: torch.Tensor) -> NDArray[np.float32]:
    """Return the logits of one position as numbers on the CPU."""
    found: NDArray[np.float32] = row.detach().float().cpu().numpy()
    return found
