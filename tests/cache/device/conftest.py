"""A real cache, put together from a configuration that says `cuda:0`; behind the door to the runtime is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.storage.fake_cuda import FakeDevice
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVSpec
from tierkv.storage.hot import DeviceHotTier

from ..support import (
    make_spec,
)
from .support import SETTINGS, Open


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    assert device.faults == []


@pytest.fixture
def open_cache(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr("tierkv.storage.hot.open_device", lambda name: device)
    monkeypatch.setattr("tierkv.core.build.device_sums", lambda: None)  # kernels cannot read what the stand-in has
    opened: list[EmbeddedCache] = []

    def open_cache(**changes: Any) -> EmbeddedCache:
        cache = tierkv.open({"state_dir": str(tmp_path / "state"), **SETTINGS, **changes}, on_device=True)
        assert isinstance(cache, EmbeddedCache)
        opened.append(cache)
        hot = cache.engine.placement.memory[0].tier
        assert isinstance(hot, DeviceHotTier)
        hot.pool.patience_s = 60.0
        return cache

    yield open_cache
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache: Open) -> EmbeddedCache:
    return open_cache()


@pytest.fixture
def spec(cache: EmbeddedCache) -> KVSpec:
    spec = make_spec()
    cache.register(spec)
    return spec
