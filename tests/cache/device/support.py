"""What the tests of a hot tier on a device share: its size, and chains on their way to it."""

from __future__ import annotations

from collections.abc import Callable

from tests.storage.fake_cuda import FakeDevice
from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVGroup, KVSpec

from ..support import (
    make_chain,
    make_spec,
    payload,
    store_far,
)

HOT, WARM = 128, 256  # blocks
SETTINGS = {
    "hot": {"capacity": "1MiB", "device": "cuda:0", "policy": "lru"},
    "warm": {"capacity": "2MiB", "policy": "lru"},
    "cold": {"capacity": "256MiB"},
}
Open = Callable[..., EmbeddedCache]


def two_groups(cache: EmbeddedCache) -> KVSpec:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 1, 64))
    cache.register(spec)
    return spec


def sink(cache: EmbeddedCache, spec: KVSpec, chain: Chain) -> None:
    """Store a chain and push it out of memory."""
    store_far(cache, spec, chain)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WARM, 99))
    cache.flush()
    assert set(cache.lookup(chain).tiers) == {"cold"}


def promote(cache: EmbeddedCache, chain: Chain) -> None:
    assert cache.prefetch(chain).wait(20.0).state == "done"
    assert set(cache.lookup(chain).tiers) == {"hot"}


def on_device(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec, chain: Chain) -> int:
    """Compare every block of a chain with what was stored, in place; return how many lie on the device."""
    count = 0
    with cache.acquire(chain, wait_s=0.0) as read:
        for ref in read.blocks:
            found = read.device_view(ref.index, ref.group)
            assert (found is not None) == (ref.tier == "hot")
            if found is not None:
                count += 1
                content = device.content(found.address, found.nbytes)
                assert content == payload(spec, chain, ref.index, ref.group)
            assert bytes(read.view(ref.index, ref.group)) == payload(spec, chain, ref.index, ref.group)
    return count
