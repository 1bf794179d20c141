"""A whole cache with its hot tier on a GPU, in this process and in a daemon's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("aiohttp")

import tierkv
from tests.cache.support import make_chain, make_spec, payload, store
from tests.gpu.conftest import DEVICES, Content, gpu, reader
from tests.service.daemon import running
from tests.storage.fake_cuda import FakeDevice
from tierkv.cache import Cache, Chain
from tierkv.spec import KVSpec

TIERS = {
    "hot": {"capacity": "4MiB", "device": "cuda:0"},
    "warm": {"capacity": "16MiB"},
    "cold": {"capacity": "64MiB", "segment": "16MiB"},
}
WITH_FAKE = """
from tests.storage.fake_cuda import FakeDevice
import tierkv.core.build, tierkv.storage.hot
tierkv.storage.hot.open_device = lambda name: FakeDevice()
tierkv.core.build.device_sums = lambda: None
"""


@pytest.fixture
def embedded(door: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    if isinstance(door, FakeDevice):
        monkeypatch.setattr("tierkv.storage.hot.open_device", lambda name: door)
        monkeypatch.setattr("tierkv.core.build.device_sums", lambda: None)
    with tierkv.open({"state_dir": str(tmp_path / "state"), **TIERS}, on_device=True) as cache:
        yield cache


def read_there(cache: Cache, spec: KVSpec, chain: Chain, content: Content) -> int:
    """Compare the blocks of a chain that are on the device with what was stored; return how many there are."""
    count = 0
    with cache.acquire(chain, wait_s=0.0) as read:
        for ref in read.blocks:
            found = read.device_view(ref.index, ref.group)
            if found is not None:
                count += 1
                assert content(found) == payload(spec, chain, ref.index, ref.group)
            assert bytes(read.view(ref.index, ref.group)) == payload(spec, chain, ref.index, ref.group)
    return count


def test_blocks_rise_to_the_device_and_are_read_there(embedded: Cache, content: Content) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain = make_chain(spec, 50)
    assert store(embedded, spec, chain) == 50
    assert embedded.prefetch(chain).wait(30.0).state == "done"
    assert set(embedded.lookup(chain).tiers) == {"hot"}
    assert read_there(embedded, spec, chain, content) == 50
    stats = embedded.stats()
    assert stats["tiers"]["hot"]["lost"] == ""
    assert stats["tiers"]["hot"]["pinned_bytes"] > 0


def test_what_does_not_fit_the_device_is_read_from_memory(embedded: Cache, content: Content) -> None:
    spec = make_spec()
    embedded.register(spec)
    chains = [make_chain(spec, 200, seed) for seed in range(4)]
    for chain in chains:
        assert store(embedded, spec, chain) == 200
        embedded.prefetch(chain).wait(30.0)
    for chain in chains:
        read_there(embedded, spec, chain, content)


@pytest.mark.parametrize("name", DEVICES)
def test_an_engine_reads_a_daemons_blocks_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDevice() if name == "fake" else gpu()
    if name == "fake":
        monkeypatch.setattr("tierkv.client.planes.open_device", lambda bus_id: door)
    spec = make_spec()
    with (
        running(TIERS, before=WITH_FAKE if name == "fake" else "") as daemon,
        tierkv.connect(daemon.url, on_device=True) as cache,
    ):
        cache.register(spec)
        chain = make_chain(spec, 50)
        assert store(cache, spec, chain) == 50
        assert cache.prefetch(chain).wait(30.0).state == "done"
        assert read_there(cache, spec, chain, reader(door)) == 50
