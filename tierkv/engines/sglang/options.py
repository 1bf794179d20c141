"""What SGLang's extra config says to tierkv, and whose KV this is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

import tierkv
from tierkv.cache import Cache
from tierkv.checkpoint import read_checkpoint
from tierkv.config import Seconds
from tierkv.engines.options import EngineOptions, read_options
from tierkv.errors import ConfigError

__all__ = ["Options", "identity_of", "ranks_of"]

_ENGINES_OWN = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"}
)


class Options(EngineOptions):
    """What the extra config says to tierkv.

    Attributes
    ----------
    room_wait_s
        Longest wait, in seconds, of one batch of writes for room.
    checkpoint
        Directory (or GGUF file) of the weights that are served: their revision is read from it. Default: the model's
        name, where that is a path.
    weights
        Instead of it: any text that changes whenever the weights, or settings that change KV, do.
    kv_dtype
        ``float8_e4m3`` or ``float8_e5m2`` for fp8 KV, whose pools do not tell them apart.
    """

    wait_s: Seconds = 5.0
    room_wait_s: Seconds = 1.0
    extra_s: Seconds = 1.0
    checkpoint: str = ""
    weights: str = ""
    kv_dtype: str = ""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """Take tierkv's part of an extra config. Raises `ConfigError` naming every fault."""
        values = {name: value for name, value in (extra_config or {}).items() if name not in _ENGINES_OWN}
        return read_options(cls, values, "the extra config")

    def open(self) -> Cache:
        """Connect to the daemon, which need not be there, or open the embedded cache."""
        if not self.url:
            return tierkv.open(self.config, tenant=self.tenant or "default")
        return tierkv.connect(
            self.url, tenant=self.tenant, token=self.token, ca=self.ca, fail_open=True, extra_s=self.extra_s
        )


def ranks_of(config: HiCacheStorageConfig) -> dict[str, Any]:
    """Return whose share of the KV this is. Latents are the same on all tensor-parallel ranks, which share them."""
    if getattr(config, "dcp_size", 1) > 1:
        raise ConfigError(
            "decode context parallelism splits pages between ranks, which tierkv does not store",
            remedy="serve without --dcp-size, or without this backend",
        )
    ranks = {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
    ranks |= {"cp_rank": config.attn_cp_rank, "cp_size": config.attn_cp_size}
    return ranks if config.is_mla_model else ranks | {"tp_rank": config.tp_rank, "tp_size": config.tp_size}


def identity_of(model: str, options: Options) -> dict[str, Any]:
    """Return the fields of a spec that say which weights made the KV."""
    if options.weights:
        if not model:
            raise ConfigError("the model has no name", remedy="name it, or set checkpoint in the extra config")
        return {"model": model, "weights": options.weights}
    path = options.checkpoint or (model if model and Path(model).exists() else "")
    if not path:
        raise ConfigError(
            f"which weights {model!r} has is not known: after an update, old KV would be served to new weights",
            remedy='set "checkpoint" in the extra config to their directory, or "weights" to a revision of them',
        )
    found = read_checkpoint(path)
    return {"model": model or found["model"]} | {name: found[name] for name in ("weights", "tokenizer", "attention")}
