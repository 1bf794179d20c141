"""SGLang: tierkv as a storage backend of HiCache, below its host memory.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "tierkv", "module_path": "tierkv.engines.sglang", "class_name": "TierKVHiCache",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "url": "unix:///run/tierkv/tierkv.sock", "checkpoint": "/models/llama"}'

One block is one page. Chains are made of SGLang's own page hashes, which hold the tokens before the page, the adapter
and the request's cache salt; the namespace adds model, weights, shape and rank. Pages are copied between a block and
the host pool once. SGLang never fails, and its threads never end, because of the cache: errors are misses, counted in
`TierKVHiCache.errors`. What is wrong with the configuration or the pool stops SGLang when it attaches, with a remedy.
"""

from __future__ import annotations

from tierkv.engines.sglang.hicache import TierKVHiCache
from tierkv.engines.sglang.options import Options

__all__ = ["Options", "TierKVHiCache"]
