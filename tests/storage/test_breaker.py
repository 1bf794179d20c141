"""The circuit breaker, by the clock of the test."""

from __future__ import annotations

from tierkv.storage.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 1.0, 4.0, clock=clock, jitter=lambda: 1.0)


def fail(breaker: Breaker, times: int = 1) -> bool:
    """Let calls fail; say whether the last one opened it."""
    opened = False
    for _ in range(times):
        assert not breaker.refuses
        opened = breaker.failed(breaker.begin())
    return opened


def test_it_opens_after_failures_in_a_row() -> None:
    it = breaker(Clock())
    fail(it, 2)
    it.begin()
    it.succeeded()
    fail(it, 2)
    assert (it.state, it.refuses, it.opened) == ("closed", False, 0)
    assert fail(it)
    assert (it.state, it.refuses, it.opened) == ("open", True, 1)


def test_one_call_at_a_time_finds_out_and_each_in_vain_doubles_the_pause() -> None:
    clock = Clock()
    it = breaker(clock)
    fail(it, 3)
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert it.refuses
        clock.now += 0.01
        assert not it.refuses
        probe = it.begin()
        assert (probe, it.state, it.refuses) == (True, "half-open", True)
        assert not it.failed(probe)
    assert it.opened == 1


def test_an_answer_closes_it_and_the_pauses_start_over() -> None:
    clock = Clock()
    it = breaker(clock)
    fail(it, 3)
    clock.now = 1.0
    fail(it)
    clock.now = 3.0
    assert it.begin()
    it.succeeded()
    assert (it.state, it.refuses) == ("closed", False)
    fail(it, 3)
    clock.now = 4.0
    assert not it.refuses
    assert it.opened == 2


def test_failures_of_calls_made_before_it_opened_do_not_count() -> None:
    clock = Clock()
    it = breaker(clock)
    early = [it.begin() for _ in range(8)]
    for probe in early:
        it.failed(probe)
    assert it.opened == 1
    clock.now = 1.0
    assert not it.refuses
    assert it.begin()
    it.failed(False)
    assert it.state == "half-open"


def test_a_probe_that_was_no_call_is_not_trusted_for_long() -> None:
    clock = Clock()
    it = breaker(clock)
    assert fail(it, 3)
    for pause in (1.0, 2.0, 4.0):
        clock.now += pause
        assert it.begin()
        it.seems_well()
        assert (it.state, it.refuses) == ("closed", False)
        assert fail(it)
        clock.now += 0.5
        assert it.refuses
        clock.now -= 0.5
    assert it.opened == 4
    clock.now += 4.0
    assert it.begin()
    it.seems_well()
    it.begin()
    it.succeeded()
    assert not fail(it, 2)
