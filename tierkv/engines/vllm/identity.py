"""What vLLM's KV is: from its configuration to the spec that names it, and how its pages make up blocks.

Everything here refuses rather than guesses: KV under a wrong name is wrong KV for somebody else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierkv.cache import Chain
from tierkv.checkpoint import read_checkpoint
from tierkv.engines.paged import payload_order
from tierkv.engines.vllm.options import Options
from tierkv.errors import ConfigError, InvalidRequest
from tierkv.keys import adopt_chain, chain_root
from tierkv.spec import GroupKind, KVGroup, KVSpec

__all__ = ["Geometry", "Named", "group_layers", "page_geometry", "read_spec"]

_LEAST_BLOCK_TOKENS = 64
_HASHES = ("sha256", "sha256_cbor")
_KINDS: Mapping[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "MLAAttentionSpec": "mla",
}
"""Exact names: what a class of its own stores in its pages is not known here."""
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
_DTYPES = {"float8_e4m3fn": "float8_e4m3"}
_POSITION_DEPENDS_ON_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Geometry:
    """How tokens, vLLM's pages, its block hashes and blocks go together.

    Attributes
    ----------
    block_tokens, page_tokens, hash_tokens
        Tokens of a block of the cache, of a page ("block") of vLLM, and between two of a request's block hashes.
    groups
        Number of vLLM's KV groups, all of which are stored.
    """

    block_tokens: int
    page_tokens: int
    hash_tokens: int
    groups: int

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens

    @property
    def hashes_per_block(self) -> int:
        return self.block_tokens // self.hash_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """One worker's KV, and the names of its blocks.

    Attributes
    ----------
    spec
        What the KV is.
    namespace, root
        `KVSpec.namespace`, and the hash its chains start from.
    """

    spec: KVSpec
    namespace: str
    root: bytes

    @classmethod
    def of(cls, spec: KVSpec, epoch: str) -> Named:
        """Name the KV of `spec` since its connector was reset.

        vLLM resets caches when somebody has changed the weights in memory, which no file tells. What is computed from
        then on is stored under a name of its own, `epoch`, that nobody else knows; empty: not reset.
        """
        if epoch:
            spec = replace(spec, extra={**spec.extra, "epoch": epoch})
        return cls(spec, spec.namespace, chain_root(spec.fingerprint))

    def chain(self, hashes: Sequence[bytes]) -> Chain:
        """Bring vLLM's hashes, which say nothing of the model, into the namespace."""
        return Chain(self.namespace, tuple(adopt_chain(self.root, hashes)))


def page_geometry(vllm_config: Any, kv_cache_config: Any, options: Options) -> Geometry:
    """Work out the geometry. Raises `ConfigError` for a configuration whose KV cannot be stored."""
    _check(vllm_config, options)
    groups = kv_cache_config.kv_cache_groups
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    if len(sizes) != 1:
        raise ConfigError(
            f"the model's KV groups have blocks of {sorted(sizes)} tokens, tierkv stores groups with equal ones",
            remedy="run this model without tierkv",
        )
    page = sizes.pop()
    hashed = int(getattr(kv_cache_config, "hash_block_size", None) or page)
    block = options.block_tokens or -(-_LEAST_BLOCK_TOKENS // page) * page
    if block % page or page % hashed:
        raise ConfigError(
            f"blocks of {block} tokens are not made of vLLM blocks of {page} with hashes every {hashed}",
            remedy=f"set block_tokens to a multiple of {page}, or leave it out",
        )
    return Geometry(block, page, hashed, len(groups))


def read_spec(
    vllm_config: Any, kv_cache_config: Any, options: Options, *, device: str, tp_rank: int, pp_rank: int
) -> KVSpec:
    """Describe the KV of one worker.

    The weights are recognised by the checkpoint's files, wherever they lie: a model of the hub must be in its local
    cache by now, which it is once vLLM has loaded it. Blocks on disk reads.

    Raises
    ------
    ConfigError
        KV that cannot be stored or recognised: groups that are not attention KV, scales computed on the fly, weights
        that are not read from files.
    InvalidRequest
        No readable checkpoint.
    """
    geometry = page_geometry(vllm_config, kv_cache_config, options)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in specs}
    if len(dtypes) != 1:
        raise ConfigError(
            f"the model's KV groups have several dtypes: {sorted(dtypes)}", remedy="use one --kv-cache-dtype"
        )
    dtype = dtypes.pop()
    found = read_checkpoint(_checkpoint(model.model, model.revision))
    quantized = str(cache.cache_dtype) if int(getattr(specs[0], "kv_quant_mode", 0)) else ""
    return KVSpec(
        model=found["model"],
        weights=found["weights"],
        tokenizer=found["tokenizer"],
        dtype=_DTYPES.get(dtype, dtype),
        block_tokens=geometry.block_tokens,
        groups=tuple(_group(group) for group in kv_cache_config.kv_cache_groups),
        attention=found["attention"],
        order=payload_order(device),
        tp_rank=tp_rank,
        tp_size=int(parallel.tensor_parallel_size),
        pp_rank=pp_rank,
        pp_size=int(parallel.pipeline_parallel_size),
        quantization=quantized,
        extra=_extra(vllm_config, found["attention"]),
    )


def group_layers(group: Any) -> list[str]:
    """Return the names of a KV group's layers in the order of the spec's layers."""
    return sorted(group.layer_names, key=_layer_index)


def _check(vllm_config: Any, options: Options) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in _HASHES:
        raise ConfigError(
            f"vLLM names blocks by {algorithm}, which does not tell them apart for certain",
            remedy="start it with --prefix-caching-hash-algo sha256",
        )
    backend = parallel.distributed_executor_backend
    if options.config is not None and (parallel.world_size != 1 or backend != "uni"):
        raise ConfigError(
            f"vLLM's scheduler and workers ({parallel.world_size}, {backend}) do not share the process of `config`",
            remedy="run `tierkv serve` and set url, or use one worker and --distributed-executor-backend uni",
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"KV split by {name} is not supported", remedy="leave it at 1, or run without tierkv")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        raise ConfigError(
            f"speculative decoding by {speculative.method} keeps KV of a second model, which has no name here",
            remedy=f"draft by one of {', '.join(_DRAFTS_WITHOUT_KV)}, or run without tierkv",
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "KV scales that are computed from the first requests differ from run to run",
            remedy="use a checkpoint that has scales, without --calculate-kv-scales",
        )
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        raise ConfigError("dummy weights are in no file, so that their KV has no name", remedy="load real weights")


def _checkpoint(model: str, revision: str | None) -> str:
    """Return the local path of a model: a directory, a file, or a snapshot of the hub that has been fetched."""
    if os.path.exists(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise InvalidRequest(
            f"the weights of {model} are not in the local cache of the hub: {error}",
            remedy="fetch the model first, or give vLLM a local directory",
        ) from None


def _group(group: Any) -> KVGroup:
    spec, names = group.kv_cache_spec, sorted(group.layer_names)
    name = type(spec).__name__
    kind = _KINDS.get(name)
    planes = 1 if kind == "mla" else 2
    plain = (
        getattr(spec, "state_content_bytes", None) is None
        and getattr(spec, "num_head_slots", None) is None
        and getattr(spec, "tokens_per_state", 1) == 1
        and not getattr(spec, "non_causal", False)
        and not getattr(spec, "extra_retained_tokens", 0)
        and int(getattr(spec, "kv_quant_mode", 0)) <= 1
        and (planes == 1 or spec.head_size_v == spec.head_size)
    )
    if kind is None or not plain or getattr(group, "is_eagle_group", False):
        raise ConfigError(
            f"layers like {names[0]} keep {name}, of which tierkv does not know what its pages hold",
            remedy="tierkv stores plain attention KV: full, sliding window and MLA; run this model without it",
        )
    layers = tuple(_layer_index(layer) for layer in group_layers(group))
    window = int(spec.sliding_window) if kind == "sliding_window" else 0
    return KVGroup(layers, kind, int(spec.num_kv_heads), int(spec.head_size), window)


def _layer_index(name: str) -> int:
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")
    if len(numbers) != 1:
        raise ConfigError(f"the layer {name} has no number of its own", remedy="run this model without tierkv")
    return int(numbers[0])


def _extra(vllm_config: Any, attention: Mapping[str, str]) -> dict[str, str]:
    """Settings that change KV and are neither in the checkpoint's files nor in a field of the spec."""
    model = vllm_config.model_config
    extra = {
        "engine": "vllm",
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "overrides": _overrides(model.hf_overrides),
    }
    if any(name in text for text in attention.values() for name in _POSITION_DEPENDS_ON_LENGTH):
        extra["max_model_len"] = str(model.max_model_len)
    return {name: value for name, value in extra.items() if value}


def _overrides(overrides: Any) -> str:
    if callable(overrides):
        raise ConfigError(
            "hf_overrides is a function, and what it changes cannot be told", remedy="give it as a mapping"
        )
    return json.dumps(overrides, sort_keys=True, default=str) if overrides else ""
