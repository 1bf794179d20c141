"""Hugging Face transformers: load a prefix into a cache object the model accepts, store what prefill produced.

`generate` and `generate_batch` are complete greedy loops. Their parts are for engines that have a loop of their own:

    spec = spec_for(model, path)                         once; and cache.register(spec)
    with cache.acquire(Chain.of(spec, tokens)) as lease:
        past, length = load_prefix(model, spec, lease)   or new_cache(model) where nothing is reused
    ...                                                  forward passes over the rest of the prompt, into `past`
    store_block(spec, past, lease, index)                under a write lease, as soon as a block is complete
    join_rows(model, pasts)                              several prompts of different lengths, for a common decode

Blocks are HND: ``(layers, 2, heads, tokens, head_dim)``, as `DynamicCache` keeps them. The engine never fails because
of its cache: in `generate` an error there reads as a miss and is counted in the result.
"""

from tierkv.engines.transformers.generation import Generation, generate, generate_batch
from tierkv.engines.transformers.identity import spec_for
from tierkv.engines.transformers.layers import new_cache
from tierkv.engines.transformers.loading import JoinedRows, join_rows, load_prefix
from tierkv.engines.transformers.storing import store_block

__all__ = [
    "Generation",
    "JoinedRows",
    "generate",
    "generate_batch",
    "join_rows",
    "load_prefix",
    "new_cache",
    "spec_for",
    "store_block",
]
