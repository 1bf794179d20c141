"""The spec of a model as it runs: what must match before its KV is reused."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.checkpoint import read_checkpoint
from tierkv.engines.transformers.forward import Forward
from tierkv.engines.transformers.layers import kv_dtype, new_cache
from tierkv.errors import InvalidRequest
from tierkv.spec import KVSpec

__all__ = ["spec_for"]

_LIVE = ("rope_parameters", "rope_theta", "rope_scaling", "quantization_config")


def spec_for(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    block_tokens: int = 64,
    adapter: str = "",
    lossy: str = "",
    exact_first_block: bool = False,
) -> KVSpec:
    """Describe the KV of a loaded model.

    Parameters
    ----------
    model
        The model as it will run: its dtype, attention implementation, RoPE settings and quantisation enter the spec.
        It is run over one token, to see that it keeps what its checkpoint says.
    path
        The checkpoint it was loaded from, see `tierkv.checkpoint.read_checkpoint`. Blocks on disk reads.
    block_tokens
        Tokens per block.
    adapter
        Id of the adapter that is active in `model`.
    lossy, exact_first_block
        As in `KVSpec`: with a codec of `LOSSY_CODECS` blocks come back from the cold tier close to what was stored, not
        the same. Such blocks have a namespace of their own, which nothing lossless is ever read from.

    Raises
    ------
    InvalidRequest
        No readable checkpoint, an adapter without an id, or state that is not KV heads per token: Mamba and its kin,
        encoders with decoders, latent attention.
    """
    forward, past = Forward(model), new_cache(model)
    if not adapter and getattr(model, "peft_config", None):
        raise InvalidRequest(
            "the model carries an adapter that has no id", remedy="pass adapter= a name or a hash of it"
        )
    fields = read_checkpoint(path)
    if any(group.kind == "mla" for group in fields["groups"]):
        raise InvalidRequest(
            f"transformers expands the latents of {fields['model']} into heads, which are not worth storing",
            remedy="serve models with latent attention through an engine that keeps the latents",
        )
    config = model.config.get_text_config().to_dict()
    live = {"implementation": model.config._attn_implementation}
    live |= {
        name: json.dumps(config[name], sort_keys=True, default=str) for name in _LIVE if config.get(name) is not None
    }
    spec = KVSpec(
        **{**fields, "attention": {**fields["attention"], **live}},
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        order="HND",
        adapter=adapter,
        lossy=lossy,
        exact_first_block=exact_first_block,
    )
    with torch.inference_mode():
        forward(torch.zeros((1, 1), dtype=torch.long, device=model.device), past)
    _compare(spec, past.layers)
    return spec


def _compare(spec: KVSpec, layers: list[Any]) -> None:
    """Raise unless every layer keeps one token's KV in the shape, type and window that the spec says."""
    said = {layer: group for group in spec.groups for layer in group.layers}
    for number, layer in enumerate(layers):
        group = said.get(number)
        planes = [] if layer.keys is None else [layer.keys, layer.values]
        if group is None:
            fits = not planes
        else:
            shape = (1, group.kv_heads, 1, group.head_dim)
            fits = bool(planes) and all(plane.shape == shape and plane.dtype == kv_dtype(spec) for plane in planes)
            # A full group keeps more than any window needs; a window shorter than the layer's would lose KV it needs.
            fits = fits and (not group.window or getattr(layer, "sliding_window", group.window + 1) <= group.window)
        if not fits:
            kept = [f"{plane.dtype} {tuple(plane.shape)}" for plane in planes] or "nothing"
            raise InvalidRequest(
                f"layer {number} keeps {kept} with window {getattr(layer, 'sliding_window', None)} for one token of "
                f"{spec.model}, where its checkpoint means {group}",
                remedy="check that the path is this model's checkpoint, or build the KVSpec and its groups by hand",
            )
