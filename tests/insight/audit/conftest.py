"""A real cache in memory, and one thread for tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.cache import Cache


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: tiny models gain nothing from more."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    import tierkv

    with tierkv.open({"warm": {"capacity": "8MiB", "directory": str(tmp_path)}}) as opened:
        yield opened
