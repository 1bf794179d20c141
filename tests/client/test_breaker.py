"""When the circuit breaker lets requests through, seen on a clock of its own."""

import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.daemon import PATIENCE_S
from tierkv.client.breaker import Breaker
from tierkv.errors import CorruptBlock, InvalidRequest, LeaseLost, StorageFull, TierFull, TierKVError, Unavailable


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("it", clock=clock, jitter=lambda: 1.0)


def ask(breaker: Breaker, error: Exception | None = None, *, probe: Exception | None = None) -> bool:
    """One request as the client makes it; say whether anything was sent."""
    try:
        if breaker.must_probe():
            with breaker.probing():
                if probe is not None:
                    raise probe
    except Unavailable as refused:
        return refused is probe
    try:
        with breaker.asking():
            if error is not None:
                raise error
    except type(error or Unavailable("")):
        pass
    return True


def dead() -> Unavailable:
    return Unavailable("nobody there")


def open_it(breaker: Breaker) -> None:
    for _ in range(3):
        assert ask(breaker, dead())
    assert breaker.health().state == "open"


def test_it_opens_after_three_failures_in_a_row(breaker: Breaker) -> None:
    for error in (dead(), dead(), None, dead(), dead(), None):
        assert ask(breaker, error)
    assert breaker.health().state == "closed"
    open_it(breaker)
    assert not ask(breaker)
    health = breaker.health()
    assert (health.failures, health.short_cut, health.opened) == (7, 1, 1)
    assert health.last_error == "nobody there"


@pytest.mark.parametrize("kind", [TierFull, InvalidRequest, LeaseLost, StorageFull, CorruptBlock])
def test_a_refusal_is_an_answer(breaker: Breaker, kind: type[TierKVError]) -> None:
    for _ in range(10):
        assert ask(breaker, kind("no"))
    assert ask(breaker, dead())
    assert ask(breaker, dead())
    assert ask(breaker, kind("no"))
    assert ask(breaker, dead())
    health = breaker.health()
    assert (health.state, health.failures) == ("closed", 3)


@pytest.mark.parametrize("error", [Unavailable("x"), TierKVError("500, no problem document"), ValueError("nonsense")])
def test_nonsense_is_a_failure(breaker: Breaker, error: Exception) -> None:
    for _ in range(3):
        assert ask(breaker, error)
    assert breaker.health().state == "open"


def test_probes_are_further_and_further_apart_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0):
        clock.now += pause - 0.001
        assert not ask(breaker)
        clock.now += 0.002
        assert ask(breaker, probe=dead())
    assert breaker.health().opened == 1


def test_jitter_takes_up_to_half_of_a_pause(clock: Clock) -> None:
    early = Breaker("it", clock=clock, jitter=lambda: 0.0)
    open_it(early)
    clock.now += 0.049
    assert not ask(early)
    clock.now += 0.002
    assert ask(early)


def test_a_probe_closes_it_and_a_success_starts_over(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 0.1
    assert ask(breaker)
    assert breaker.health().state == "closed"
    assert ask(breaker, dead())
    assert ask(breaker, dead())
    assert breaker.health().state == "closed", "a success was forgotten"
    assert ask(breaker, dead())
    clock.now += 0.1
    assert ask(breaker, probe=dead()), "the pause had not started over"


def test_something_that_passes_probes_and_nothing_else_is_left_alone(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    for pause in (0.1, 0.2, 0.4, 0.8):
        clock.now += pause - 0.001
        assert not ask(breaker)
        clock.now += 0.002
        assert ask(breaker, dead()), "the probe succeeded, so the request is made"
        assert breaker.health().state == "open"


def test_one_probes_and_the_others_do_not_wait(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 1
    probing, answered = threading.Event(), threading.Event()

    def probe() -> None:
        assert breaker.must_probe()
        with breaker.probing():
            probing.set()
            assert answered.wait(PATIENCE_S)

    prober = threading.Thread(target=probe)
    prober.start()
    assert probing.wait(PATIENCE_S)
    assert breaker.health().state == "half-open"
    assert [ask(breaker) for _ in range(5)] == [False] * 5
    answered.set()
    prober.join(PATIENCE_S)
    assert ask(breaker)
    assert breaker.health().short_cut == 5


def test_an_interrupted_probe_leaves_no_door_half_open(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 1
    assert breaker.must_probe()
    with pytest.raises(KeyboardInterrupt), breaker.probing():
        raise KeyboardInterrupt
    assert breaker.health().state == "open"
    clock.now += 1
    assert ask(breaker)


def test_the_time_it_was_open_is_added_up(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 2
    assert breaker.health().open_s == pytest.approx(2)
    ask(breaker)
    clock.now += 10
    assert breaker.health().open_s == pytest.approx(2)
    open_it(breaker)
    clock.now += 1
    assert breaker.health().open_s == pytest.approx(3)


def test_who_asked_before_it_opened_changes_nothing_after(breaker: Breaker, clock: Clock) -> None:
    def late(error: Exception | None) -> None:
        with breaker.asking():
            open_it(breaker)
            clock.now += 0.05
            if error is not None:
                raise error

    late(None)
    assert breaker.health().state == "open"
    clock.now += 0.05
    assert ask(breaker)
    with pytest.raises(Unavailable):
        late(dead())
    assert breaker.health().opened == 2
    clock.now += 0.05
    assert ask(breaker), "the failure put the probe off"


Event = tuple[float, bool, bool]


@given(st.lists(st.tuples(st.floats(0, 8), st.booleans(), st.booleans()), max_size=60))
def test_whatever_happens_it_asks_seldom_while_it_fails_and_always_recovers(events: list[Event]) -> None:
    clock = Clock()
    breaker = Breaker("it", clock=clock)
    before = breaker.health()
    for pause, probe_works, works in events:
        clock.now += pause
        was = breaker.health().state
        sent = ask(breaker, None if works else dead(), probe=None if probe_works else dead())
        health = breaker.health()
        assert sent or was == "open"
        if sent:
            assert health.state == "closed" or health.failures == before.failures + 1
        assert pause < 5 or sent, "nobody asked for longer than the longest pause"
        for name in ("failures", "short_cut", "opened", "open_s"):
            assert getattr(health, name) >= getattr(before, name)
        before = health
    clock.now += 5
    assert ask(breaker)
    assert breaker.health().state == "closed"


def in_a_child(check: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_begins_anew_even_if_the_lock_was_taken(breaker: Breaker) -> None:
    open_it(breaker)
    with breaker._lock:
        assert in_a_child(lambda: ask(breaker) and breaker.health().failures == 0) == 0
    assert breaker.health().state == "open"
