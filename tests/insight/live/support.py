"""A real cache that is observed, and requests for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.traces import block_key
from tierkv.cache import Chain
from tierkv.config import Config, parse_config
from tierkv.embedded import EmbeddedCache, open_cache
from tierkv.insight.live import Insight
from tierkv.spec import KVGroup, KVSpec

BLOCK_TOKENS = 16
BLOCK_BYTES = 2048
SPEC = KVSpec("model", "weights", "uint8", BLOCK_TOKENS, (KVGroup((0,), "full", 1, BLOCK_BYTES // 2 // BLOCK_TOKENS),))
WARM_BLOCKS = (1 << 20) // BLOCK_BYTES


@dataclass(frozen=True)
class Observed:
    """A cache with its insight."""

    cache: EmbeddedCache
    insight: Insight
    config: Config

    def ask(self, blocks: Sequence[int], tenant: str = "default", *, store: bool = True, **terms: Any) -> int:
        """One request for the blocks of these numbers: read what is there, store the rest; return the hit blocks."""
        cache = self.cache.for_tenant(tenant)
        chain = numbered(blocks)
        with cache.acquire(chain, **terms) as read:
            hit = read.hit_blocks
        for start in range(hit, len(chain) if store else 0, WARM_BLOCKS // 4):
            upto = Chain(chain.namespace, chain.hashes[: start + WARM_BLOCKS // 4])
            with cache.reserve(upto, start=start) as write:
                for grant in write.granted:
                    write.write(grant.index, bytes(grant.length))
                write.commit()
        return hit

    def report(self, tenant: str | None = None) -> dict[str, Any]:
        return self.insight.report(None if tenant is None else self.cache.engine.tenant(tenant))


def numbered(blocks: Sequence[int]) -> Chain:
    """A chain whose hashes stand for numbers: equal numbers behind equal ones are equal blocks."""
    return Chain(SPEC.namespace, tuple(map(block_key, blocks)))


@contextmanager
def observed(settings: dict[str, Any] | None = None, **insight: Any) -> Iterator[Observed]:
    config = parse_config({"warm": {"capacity": "1MiB", "policy": "slru"}, **(settings or {}), "insight": insight})
    cache = open_cache(config)
    try:
        cache.register(SPEC)
        looking = Insight(cache.engine, config, b"salt")
        try:
            yield Observed(cache, looking, config)
        finally:
            looking.close()
    finally:
        cache.close()


def accounted(tally: dict[str, Any]) -> bool:
    """Whether hit and lost tokens are all that was requested."""
    return bool(sum(tally["hit_tokens"].values()) + sum(tally["lost_tokens"].values()) == tally["requested_tokens"])
