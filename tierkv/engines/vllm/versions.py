"""Which vLLM this connector is for: a range of versions, and an interface that is looked at before it is used."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping

from tierkv.errors import DependencyMissing

__all__ = ["SUPPORTED", "check_vllm"]

SUPPORTED = ((0, 32), (0, 34))
"""From this version on, and before that one."""

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METHODS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "reset_cache": (),
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "shutdown": (),
}
_FIELDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_BASE, "KVConnectorTransferResults"): ("finished_recving", "failed_recving"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): ("req_ids",),
    ("vllm.v1.core.sched.output", "SchedulerOutput"): ("num_scheduled_tokens", "kv_connector_block_state"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("num_blocks", "kv_cache_groups", "hash_block_size"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("layer_names", "kv_cache_spec", "is_eagle_group"),
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): ("num_kv_heads", "head_size", "head_size_v", "dtype"),
}


def check_vllm() -> None:
    """Raise `DependencyMissing`, an `ImportError`, unless vLLM is there and what the connector relies on is in it."""
    (low, high), remedy = SUPPORTED, _remedy()
    try:
        found = str(importlib.import_module("vllm").__version__)
    except ImportError:
        raise DependencyMissing("the connector runs inside vLLM, which is not installed", remedy=remedy) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)  # a build from a working tree may be called "dev": its interface decides
    if numbers is not None and not low <= (int(numbers[1]), int(numbers[2])) < high:
        raise DependencyMissing(f"vLLM {found} is not supported", remedy=remedy)
    differences = ", ".join(_differences())
    if differences:
        raise DependencyMissing(f"vLLM {found} has another connector interface: {differences}", remedy=remedy)


def _remedy() -> str:
    (low, high) = (".".join(map(str, version)) for version in SUPPORTED)
    return f"install vllm>={low},<{high}, or a tierkv that knows this one"


def _differences() -> Iterator[str]:
    base = getattr(_module(_BASE), "KVConnectorBase_V1", None)
    for name, expected in _METHODS.items():
        method = getattr(base, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if callable(method) else None
        if found != expected:
            yield f"{name}{expected} is {found or 'missing'}"
    for (module, name), fields in _FIELDS.items():
        known = getattr(getattr(_module(module), name, None), "__dataclass_fields__", {})
        yield from (f"{name}.{field} is missing" for field in fields if field not in known)


def _module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
