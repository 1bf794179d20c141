"""Steps mean the same driven by a thread and by asyncio, and clean up however they end."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tierkv.core.steps import Pause, Step, run, run_async

Drive = Callable[[Step[Any]], Any]


@pytest.fixture(params=["thread", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Drive:
    return run if request.param == "thread" else lambda step: asyncio.run(run_async(step))


def done(value: object = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_a_step_gives_its_result(drive: Drive) -> None:
    def step() -> Step[str]:
        yield Pause([], math.inf)
        yield Pause([done(), done()], math.inf)
        return "result"

    assert drive(step()) == "result"


def test_a_pause_lasts_until_all_futures_are_done(drive: Drive) -> None:
    first: Future[None] = Future()
    second: Future[None] = Future()

    def step() -> Step[tuple[bool, bool]]:
        threading.Timer(0.01, first.set_result, (None,)).start()
        threading.Timer(0.03, second.set_result, (None,)).start()
        yield Pause([first, second], math.inf)
        return first.done(), second.done()

    assert drive(step()) == (True, True)


def test_a_pause_ends_at_its_deadline(drive: Drive) -> None:
    never: Future[None] = Future()

    def step() -> Step[float]:
        yield Pause([never], time.monotonic() - 1.0)
        deadline = time.monotonic() + 0.02
        yield Pause([never, done()], deadline)
        return time.monotonic() - deadline

    assert drive(step()) >= 0.0
    assert not never.cancelled()


def test_an_error_in_a_step_comes_out_after_its_cleanup(drive: Drive) -> None:
    cleaned: list[bool] = []

    def step() -> Step[None]:
        try:
            yield Pause([done()], math.inf)
            raise KeyError("inside")
        finally:
            cleaned.append(True)

    with pytest.raises(KeyError):
        drive(step())
    assert cleaned == [True]


async def test_cancellation_cleans_up_and_leaves_shared_futures_alone() -> None:
    shared: Future[str] = Future()
    cleaned = asyncio.Event()

    def step() -> Step[str]:
        try:
            yield Pause([shared], math.inf)
            return shared.result()
        finally:
            cleaned.set()

    cancelled = asyncio.ensure_future(run_async(step()))
    patient = asyncio.ensure_future(run_async(step()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert cleaned.is_set()
    assert not shared.cancelled()
    shared.set_result("for the other")
    assert await patient == "for the other"
