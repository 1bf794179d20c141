"""What SGLang's extra config says to tierkv, and whose KV this is."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

import tierkv
from tierkv.cache import Cache
from tierkv.checkpoint import read_checkpoint
from tierkv.errors import ConfigError

__all__ = ["Options", "identity_of", "ranks_of"]

_ENGINES_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


@dataclass(frozen=True, slots=True)
class Options:
    """What the extra config says to tierkv.

    Attributes
    ----------
    url, tenant, token
        The daemon, as in `tierkv.connect`. It may be down, now or later: there are no hits then.
    config
        Instead of a daemon: settings, or a file of them, for a cache in this process, as in `tierkv.open`.
    wait_s
        Longest wait, in seconds, of one batch of reads for blocks that must be loaded first.
    room_wait_s
        Longest wait, in seconds, of one batch of writes for room.
    extra_s
        Longest time, in seconds, that a call may take beyond such waits, whatever the daemon does.
    checkpoint
        Directory (or GGUF file) of the weights that are served: their revision is read from it. Default: the model's
        name, where that is a path.
    weights
        Instead of it: any text that changes whenever the weights, or settings that change KV, do.
    kv_dtype
        ``float8_e4m3`` or ``float8_e5m2`` for fp8 KV, whose pools do not tell them apart.
    """

    url: str = ""
    tenant: str = ""
    token: str = ""
    config: str | Mapping[str, Any] = ""
    wait_s: float = 5.0
    room_wait_s: float = 1.0
    extra_s: float = 1.0
    checkpoint: str = ""
    weights: str = ""
    kv_dtype: str = ""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """Take tierkv's part of an extra config. Raises `ConfigError` naming the key."""
        values = {name: value for name, value in (extra_config or {}).items() if name not in _ENGINES_OWN}
        known = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise ConfigError(f"the extra config has an unknown key {name!r}", remedy=hint)
            if known[name] is float:
                good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            else:
                good = isinstance(value, str) or (name == "config" and isinstance(value, Mapping))
            if not good:
                raise ConfigError(f"{name} in the extra config cannot be {value!r}", remedy="see docs/engines.md")
        options = cls(**values)
        if bool(options.url) == bool(options.config):
            raise ConfigError(
                "the extra config must name one cache",
                remedy='set "url" for a daemon, or "config" for a cache in this process',
            )
        return options

    def open(self) -> Cache:
        """Connect to the daemon, which need not be there, or open the embedded cache."""
        if self.config:
            return tierkv.open(self.config, tenant=self.tenant or "default")
        return tierkv.connect(
            self.url, tenant=self.tenant or None, token=self.token or None, fail_open=True, extra_s=self.extra_s
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
