"""The forward pass under the names that a model and its version of transformers use."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tierkv.errors import InvalidRequest

__all__ = ["Forward", "end_tokens"]


class Forward:
    """Appends tokens to a cache object and returns the logits of the last one.

    Raises
    ------
    InvalidRequest
        The model takes no cache object, is an encoder or has one, or keeps a state that every token changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._takes = inspect.signature(type(model).forward).parameters
        # The name of the cache changed in transformers 5.
        self._name = next((name for name in ("cache", "past_key_values") if name in self._takes), "")
        # Mamba and its kin keep one state for all tokens; in an encoder a token's KV depends on those after it.
        marks = (vars(module).get(name) for module in model.modules() for name in ("is_causal", "is_decoder"))
        encodes = {mark for mark in marks if mark is not None} == {False}
        if not self._name or encodes or model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise InvalidRequest(
                f"{type(model).__name__} keeps a state that is not KV per token",
                remedy="tierkv caches decoders with attention layers; run this model without it",
            )

    def __call__(
        self,
        ids: torch.Tensor,
        past: DynamicCache,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run `ids` of shape ``(rows, tokens)``; return logits of ``(rows, vocabulary)``. Mutates `past`.

        `mask` (``(rows, tokens so far)``) and `positions` (``(rows, tokens)``) are for rows with padding.
        """
        options: dict[str, Any] = {self._name: past, "use_cache": True}
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 1
        if mask is not None:
            options |= {"attention_mask": mask, "position_ids": positions}
        logits: torch.Tensor = self._model(input_ids=ids, **options).logits
        return logits[:, -1]

    def require_positions(self) -> None:
        """Raise `InvalidRequest` if the model cannot be told where a padded row begins."""
        if "position_ids" not in self._takes:
            raise InvalidRequest(
                f"{type(self._model).__name__} takes no position_ids, so prompts of different lengths cannot be joined",
                remedy="generate one prompt at a time",
            )


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end an answer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset(found if isinstance(found, Iterable) else [found])
