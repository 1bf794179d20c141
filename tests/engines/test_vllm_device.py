"""The connector's worker over pages of a device: what it asks of them, and what becomes of a save that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from tests.engines.paged_engine import BLOCK, FULL, Bench, Ran, Request, opened, spec_of
from tierkv.engines.paged_device import DevicePages
from tierkv.errors import DeviceError

PROMPT = list(range(100, 140))  # five blocks
NAMES = count()


class Watched(DevicePages):
    """Notes what it is asked, and fails when it is told to."""

    log: list[str]
    failing = False

    def start_save(self, blocks: Sequence[tuple[Sequence[int], memoryview]]) -> Any:
        if self.failing:
            raise DeviceError("no memory for a gather")
        return super().start_save(blocks)

    def load(self, payload: memoryview, pages: Sequence[int]) -> None:
        self.log.append("load")
        super().load(payload, pages)

    def follow_engine(self) -> None:
        self.log.append("follow")
        super().follow_engine()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(Watched, "log", [], raising=False)
    monkeypatch.setattr(Watched, "failing", False)
    monkeypatch.setattr("tierkv.engines.vllm.worker.open_group", Watched)
    return Watched


def request() -> Request:
    return Request(f"r{next(NAMES)}", PROMPT)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened() as found:
        yield found


def test_blocks_go_through_pages_of_a_device(bench: Bench) -> None:
    tiny = bench.engine()
    assert tiny.run(request()) == Ran(0, False)
    tiny.settle()
    assert tiny.run(request()) == Ran(4 * BLOCK, False)
    tiny.settle()


def test_loads_come_after_what_the_engine_has_queued(bench: Bench, watched: type[Watched]) -> None:
    tiny = bench.engine(spec_of(FULL))
    tiny.run(request())
    tiny.settle()
    watched.log.clear()
    tiny.run(request())
    assert watched.log == ["follow"] + ["load"] * 4


def test_a_save_that_fails_is_counted_and_costs_no_staging_memory(watched: type[Watched]) -> None:
    with opened(staging_bytes=5 * spec_of(FULL).layout().nbytes) as bench:
        tiny = bench.engine(spec_of(FULL))
        watched.failing = True
        tiny.run(request())
        tiny.settle()
        assert bench.link.take_counts()["save_failed"] > 0
        watched.failing = False
        tiny.run(request())
        tiny.settle()
        assert "blocks_dropped" not in bench.link.take_counts()
        assert tiny.run(request()).external == 4 * BLOCK
