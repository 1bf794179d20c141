"""vLLM: prompts whose prefix any engine has computed before start with its KV.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TierKVConnector",
      "kv_connector_module_path": "tierkv.engines.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"url": "unix:///run/tierkv.sock"}}'

    connector   what vLLM calls; tells the two below
    scheduler   in vLLM's scheduler: asks the cache what is there, orders loads and saves
    worker      in each worker: copies blocks between the cache and vLLM's pages, on threads of its own
    identity    what vLLM's KV is: the spec under which it is stored
    options     ``kv_connector_extra_config``
    versions    which vLLM this is for

vLLM is imported, and its version checked, when the connector's class is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierKVConnector"]


def __getattr__(name: str) -> Any:
    if name != "TierKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.engines.vllm.versions import check_vllm

    check_vllm()
    from tierkv.engines.vllm.connector import TierKVConnector

    return TierKVConnector
