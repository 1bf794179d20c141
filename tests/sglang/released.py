"""The released SGLang, as far as it runs on a CPU: its host pools, its cache controller, its page hashes.

SGLang's package root imports kernels that need a GPU; it is replaced by an empty one, of which the rest is found. Of
torchvision, which must match torch and is used for pictures only, nothing but the name is there.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import transformers  # noqa: F401  # before the stand-in: it must not find a torchvision


class _Nothing(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)


class _NoPictures(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _prepare() -> None:
    found = find_spec("sglang")
    assert found is not None, "no SGLang in this environment"
    root = types.ModuleType("sglang")
    root.__path__ = list(found.submodule_search_locations or ())
    sys.modules["sglang"] = root
    sys.meta_path.append(_NoPictures())


_prepare()

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.cpp_utils import native_hash  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolName,
)
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller  # noqa: E402
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import (  # noqa: E402
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

__all__ = [
    "LAYERS",
    "PAGE",
    "Controller",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "HiCacheStorageFailureInjector",
    "PoolEntry",
    "PoolName",
    "fill",
    "key",
    "layer_rows",
    "mha_pool",
    "mla_pool",
    "page_hashes",
    "storage_config",
]

PAGE, LAYERS, _TOKENS = 4, 3, 64
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # these pools are small, and so may the machine be
PATIENCE_S = 30.0


def mha_pool(
    layout: str = "page_first",
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
    dim: int = 8,
    v_dim: int | None = None,
    tokens: int = _TOKENS,
) -> Any:
    """A real host pool for 128 tokens and a page of 2 heads."""
    heads, v_dim = 2, dim if v_dim is None else v_dim
    keys = tuple(torch.zeros(tokens, heads, dim, dtype=dtype) for _ in range(LAYERS))
    values = tuple(torch.zeros(tokens, heads, v_dim, dtype=dtype) for _ in range(LAYERS))
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=keys, v=values, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD),
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    kind = MHATokenToKVPoolHost if v_dim == dim else AsymmetricMHATokenToKVPoolHost
    return kind(info, 2.0, 0, page, layout, False, device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS)


def mla_pool(layout: str = "page_first", *, dtype: torch.dtype = torch.bfloat16, page: int = PAGE) -> Any:
    """A real host pool of latents."""
    rank, rope = 12, 4
    info = MLABufferInfo(
        buffers=tuple(torch.zeros(_TOKENS, 1, rank + rope, dtype=dtype) for _ in range(LAYERS)),
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        page,
        layout,
        False,
        device_capacity_tokens=_TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def fill(pool: Any, seed: int) -> None:
    """Fill a pool with random bits, every NaN and infinity among them."""
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def layer_rows(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """What the pool itself says is the KV of some tokens, as bytes: K and V (or latents) of each layer."""
    latents = hasattr(pool, "kv_cache_dim")
    if latents and pool.layout == "page_first_direct":  # (page, layer, token, 1, dim)
        layers = list(pool.kv_buffer.transpose(0, 1))
    elif latents:
        layers = pool.data_refs
    elif pool.layout == "page_head":  # (2, page, head, token, layer, dim)
        layers = list(pool.kv_buffer.permute(0, 4, 1, 3, 2, 5).flatten(0, 1))
    else:
        layers = [*pool.k_data_refs, *pool.v_data_refs]
    by_token = [layer if len(layer) == pool.size else layer.flatten(0, 1) for layer in layers]
    return [layer[indices].contiguous().view(torch.uint8) for layer in by_token]


def key(tokens: Sequence[int], *, extra_key: str | None = None, cache_salt: str | None = None) -> Any:
    """A request's tokens, with what keeps it from sharing with others."""
    return RadixKey(array("q", tokens), extra_key, cache_salt=cache_salt)


def page_hashes(tokens: Any, last_hash: str | None = None, page: int = PAGE) -> list[str]:
    """SGLang's own hashes of the pages of some tokens."""
    hashes: list[str] = get_storage_hash_str(tokens, last_hash, page_size=page)
    return hashes


def storage_config(extra: Mapping[str, Any], **changes: Any) -> Any:
    """What SGLang tells a backend."""
    told = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        "extra_config": dict(extra),
    }
    return HiCacheStorageConfig(**{**told, **changes})


class Controller:
    """A real `HybridCacheController` with its threads, over a real host pool; what it moves to a GPU is left out.

    Parameters
    ----------
    extra
        The extra config for tierkv.
    zero_copy
        Whether it uses the batch methods with indices into the pool, or those with flat pages.
    """

    def __init__(self, pool: Any, extra: Mapping[str, Any], *, zero_copy: bool = True, metrics: bool = False) -> None:
        alone = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        for module in (cache_controller, hybrid_cache_controller):
            module.get_parallel = lambda: alone
        cache_controller.is_dp_attention_enabled = lambda: False
        device = SimpleNamespace(device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None)
        self.pool = pool
        anchor = PoolEntry(PoolName.KV, pool, None, lambda layer: layer, is_primary_index_anchor=True)
        self.controller = hybrid_cache_controller.HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            HostPoolGroup([anchor]),
            PAGE,
            None,
            threading.Event(),
            io_backend="kernel",
            storage_backend="dynamic",
            model_name="model",
            storage_backend_extra_config={
                "backend_name": "tierkv",
                "module_path": "tierkv.engines.sglang",
                "class_name": "TierKVHiCache",
                "interface_v1": int(zero_copy),
                **extra,
            },
            enable_storage_metrics=metrics,
        )

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def threads(self) -> list[threading.Thread]:
        c = self.controller
        return [c.prefetch_thread, c.prefetch_io_aux_thread, c.prefetch_sync_thread, c.backup_thread]

    def write(self, tokens: Any, prefix_keys: list[str] | None = None, last_hash: str | None = None) -> torch.Tensor:
        """Store the pages of new tokens, as a backup of a radix node does; return where they lie in the pool."""
        indices: torch.Tensor = self.pool.alloc(len(tokens))
        self.stored = self.write_at(indices, tokens, prefix_keys, last_hash)
        return indices

    def write_at(self, indices: torch.Tensor, tokens: Any, prefix_keys: Any, last_hash: str | None) -> int:
        """Return how many tokens of it the controller believes to be stored."""
        self.controller.write_storage(indices, tokens, page_hashes(tokens, last_hash), prefix_keys)
        done: int = self.controller.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens
        return done

    def prefetch(
        self, tokens: Any, prefix_keys: list[str] | None = None, last_hash: str | None = None
    ) -> tuple[int, torch.Tensor]:
        """Load what is stored of a request; return how many tokens, and where they lie in the pool."""
        c = self.controller
        c.prefetch(CacheRequestHandle("request", 0), tokens, last_hash, prefix_keys)
        found = c.prefetch_hit_queue.get(timeout=PATIENCE_S)
        hit = int(found.storage_hit_count)
        found.host_indices = self.pool.alloc(hit)
        c.prefetch_buffer.put(found)
        loaded = 0
        while True:
            ack = c.ack_prefetch_queue.get(timeout=PATIENCE_S)
            loaded = max(loaded, ack.completed_tokens or 0)
            if ack.completed_req:
                return loaded, found.host_indices[:loaded]

    def close(self) -> None:
        self.controller.detach_storage_backend()


def _hash_in_python() -> None:
    """Where there is no compiler for SGLang's hash extension, chain SHA-256 as it does."""

    def get_hash(
        raw: Any, count: int, width: int, bigram: bool, prior: bytes | None, page: int | None
    ) -> str | list[str]:
        assert not bigram
        step, digests = page or count, []
        for start in range(0, count - step + 1, step):
            tokens = array("I", raw[start * width : (start + step) * width]).tobytes()
            prior = hashlib.sha256((prior or b"") + tokens).digest()
            digests.append(prior.hex())
        return digests if page else digests[-1]

    native_hash._load_native_hash_module = lambda: SimpleNamespace(get_hash=get_hash)


try:
    native_hash._load_native_hash_module()
except RuntimeError:
    _hash_in_python()
