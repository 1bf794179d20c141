"""The load scheduler: order, bound, hastening and cancelling, against a model that does the same with a sorted list."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.core.scheduler import Job, LoadScheduler
from tierkv.errors import Unavailable

PATIENCE_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do and tells nobody of."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.0001)


class Work:
    """A job that says when it begins and then waits until it may end."""

    def __init__(self, begun: SimpleQueue[Work], name: object = None, error: BaseException | None = None) -> None:
        self.name = name
        self.may_end = threading.Event()
        self._begun = begun
        self._error = error

    def __call__(self) -> None:
        self._begun.put(self)
        assert self.may_end.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error


class Desk:
    """A scheduler with jobs that the test holds in its hand."""

    def __init__(self, threads: int, max_bytes: int) -> None:
        self.scheduler = LoadScheduler(threads, max_bytes)
        self.begun: SimpleQueue[Work] = SimpleQueue()
        self.works: list[Work] = []

    def submit(
        self, name: object, *, nbytes: int = 1, deadline: float = inf, error: BaseException | None = None
    ) -> tuple[Job, Work]:
        work = Work(self.begun, name, error)
        self.works.append(work)
        return self.scheduler.submit(work, nbytes, deadline), work

    def next_begun(self) -> object:
        return self.begun.get(timeout=PATIENCE_S).name

    def nothing_begins(self) -> bool:
        return self.begun.empty()

    def run_all(self) -> list[object]:
        """Let everything run and return the order of beginning."""
        for work in self.works:
            work.may_end.set()
        wait_until(lambda: not self.scheduler.queued)
        self.scheduler.close()
        return [self.next_begun() for _ in range(self.begun.qsize())]


@pytest.fixture
def desks() -> Iterator[list[Desk]]:
    made: list[Desk] = []
    yield made
    for desk in made:
        for work in desk.works:
            work.may_end.set()
        desk.scheduler.close()


@pytest.fixture
def desk(desks: list[Desk]) -> Desk:
    """One thread, which is busy with a first job until the test lets it end."""
    desks.append(Desk(1, 100))
    desks[0].submit("first")
    assert desks[0].next_begun() == "first"
    return desks[0]


@pytest.fixture
def wide(desks: list[Desk]) -> Desk:
    """More threads than jobs: only bytes are short."""
    desks.append(Desk(8, 100))
    return desks[0]


def test_the_earliest_deadline_runs_first_and_equals_in_the_order_they_came(desk: Desk) -> None:
    for name, deadline in (("c", 3.0), ("inf", inf), ("a", 1.0), ("b1", 2.0), ("b2", 2.0), ("inf2", inf), ("b3", 2.0)):
        desk.submit(name, deadline=deadline)
    assert desk.run_all() == ["a", "b1", "b2", "b3", "c", "inf", "inf2"]


def test_a_hastened_job_overtakes_and_a_later_deadline_changes_nothing(desk: Desk) -> None:
    jobs = {name: desk.submit(name, deadline=deadline)[0] for name, deadline in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    desk.scheduler.hasten(jobs["c"], 0.5)
    desk.scheduler.hasten(jobs["c"], 0.7)
    desk.scheduler.hasten(jobs["a"], 9.0)
    desk.scheduler.hasten(jobs["b"], 1.0)
    assert desk.scheduler.queued == 3
    assert desk.run_all() == ["c", "a", "b"]


def test_a_job_runs_once_however_often_it_is_hastened(desk: Desk) -> None:
    job, _ = desk.submit("a", deadline=1000.0)
    for deadline in range(999, 0, -1):
        desk.scheduler.hasten(job, float(deadline))
    desk.submit("b", deadline=500.0)
    assert desk.run_all() == ["a", "b"]


def test_a_cancelled_job_never_begins_and_one_that_has_begun_is_not_cancelled(desk: Desk) -> None:
    first, _ = desk.submit("a", nbytes=10, deadline=1.0)
    second, _ = desk.submit("b", nbytes=5, deadline=2.0)
    assert desk.scheduler.waiting_bytes == 15
    assert desk.scheduler.cancel(first)
    assert not desk.scheduler.cancel(first)
    assert (desk.scheduler.queued, desk.scheduler.waiting_bytes) == (1, 5)
    desk.scheduler.hasten(first, 0.0)
    assert desk.run_all() == ["b"]
    assert not desk.scheduler.cancel(second)


def test_bytes_in_flight_stay_within_the_bound_and_nobody_overtakes_a_large_one(wide: Desk) -> None:
    _, a = wide.submit("a", nbytes=60, deadline=1.0)
    wide.submit("b", nbytes=40, deadline=2.0)
    assert {wide.next_begun(), wide.next_begun()} == {"a", "b"}
    wide.submit("large", nbytes=70, deadline=3.0)
    wide.submit("small", nbytes=0, deadline=4.0)
    assert (wide.scheduler.running_bytes, wide.scheduler.queued, wide.scheduler.waiting_bytes) == (100, 2, 70)
    a.may_end.set()
    wide.works[1].may_end.set()
    assert {wide.next_begun(), wide.next_begun()} == {"large", "small"}


def test_a_job_larger_than_the_bound_runs_alone(wide: Desk) -> None:
    _, small = wide.submit("small", nbytes=1)
    assert wide.next_begun() == "small"
    _, huge = wide.submit("huge", nbytes=1000)
    wide.submit("after", nbytes=0)
    assert wide.scheduler.queued == 2
    small.may_end.set()
    assert wide.next_begun() == "huge"
    assert wide.nothing_begins()
    assert wide.scheduler.queued == 1
    huge.may_end.set()
    assert wide.next_begun() == "after"


def test_cancelling_the_one_that_waits_for_bytes_lets_all_behind_it_begin(wide: Desk) -> None:
    wide.submit("a", nbytes=50)
    assert wide.next_begun() == "a"
    large, _ = wide.submit("large", nbytes=90, deadline=1.0)
    for name in ("b", "c", "d"):
        wide.submit(name, nbytes=10, deadline=2.0)
    _, urgent = wide.submit("urgent", nbytes=0, deadline=0.0)  # by its end the threads have seen that `large` waits
    urgent.may_end.set()
    assert wide.next_begun() == "urgent"
    assert wide.scheduler.queued == 4
    assert wide.scheduler.cancel(large)
    assert {wide.next_begun() for _ in range(3)} == {"b", "c", "d"}


def test_the_end_of_a_large_job_lets_as_many_begin_as_fit(wide: Desk) -> None:
    _, large = wide.submit("large", nbytes=100)
    assert wide.next_begun() == "large"
    for name in ("a", "b", "c", "d"):
        wide.submit(name, nbytes=30)
    large.may_end.set()
    assert {wide.next_begun() for _ in range(3)} == {"a", "b", "c"}
    assert (wide.scheduler.running_bytes, wide.scheduler.queued) == (90, 1)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_a_job_that_raises_is_logged_and_costs_no_thread(
    desk: Desk, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "tierkv.core.scheduler"):
        for n in range(3):
            desk.submit(n, error=error)
        desk.submit("after")
        assert desk.run_all() == [0, 1, 2, "after"]
    assert len(caplog.records) == 3
    assert caplog.records[0].exc_info
    assert desk.scheduler.running_bytes == 0


def test_a_job_may_submit_hasten_and_cancel(desk: Desk) -> None:
    doomed, _ = desk.submit("doomed", deadline=5.0)
    last, _ = desk.submit("last", deadline=9.0)
    desk.submit("middle", deadline=4.0)

    def busy() -> None:
        desk.scheduler.cancel(doomed)
        desk.scheduler.hasten(last, 1.0)
        desk.submit("new", deadline=3.0)
        desk.works[-1].may_end.set()

    desk.scheduler.submit(busy, 1, 0.0)
    assert desk.run_all() == ["last", "new", "middle"]


def test_no_lock_is_held_while_a_job_runs_or_a_caller_holds_its_own(desk: Desk) -> None:
    """An engine submits under its lock, and its jobs take that lock."""
    lock, begun, done = threading.Lock(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        with lock:
            done.set()

    with lock:
        desk.scheduler.submit(job, 1, 0.0)
        desk.works[0].may_end.set()
        assert begun.wait(PATIENCE_S)
        other, _ = desk.submit("other")
        desk.scheduler.hasten(other, 1.0)
        assert desk.scheduler.cancel(other)
        assert not done.is_set()
    assert done.wait(PATIENCE_S)


def test_close_lets_running_jobs_end_and_returns_the_others_by_urgency(desk: Desk) -> None:
    jobs = [desk.submit(name, nbytes=7, deadline=d)[0] for name, d in (("c", 3.0), ("x", 1.5), ("a", 1.0), ("b", 9.0))]
    desk.scheduler.hasten(jobs[3], 2.0)
    desk.scheduler.cancel(jobs[1])
    begun, ended = threading.Event(), threading.Event()

    def outlast() -> None:
        begun.set()
        wait_until(lambda: not desk.scheduler.queued)  # until `close` has dropped the others
        ended.set()

    desk.scheduler.submit(outlast, 1, 0.0)
    desk.works[0].may_end.set()
    assert begun.wait(PATIENCE_S)
    assert desk.scheduler.close() == [jobs[2], jobs[3], jobs[0]]
    assert ended.is_set()
    assert desk.nothing_begins()
    assert (desk.scheduler.queued, desk.scheduler.waiting_bytes, desk.scheduler.running_bytes) == (0, 0, 0)
    assert not any(desk.scheduler.cancel(job) for job in jobs)
    assert desk.scheduler.close() == []
    with pytest.raises(Unavailable):
        desk.submit("late")


def test_a_job_that_closes_its_scheduler_does_not_wait_for_itself(desk: Desk) -> None:
    closed = threading.Event()

    def close() -> None:
        desk.scheduler.close()
        closed.set()

    desk.scheduler.submit(close, 1, 0.0)
    desk.works[0].may_end.set()
    assert closed.wait(PATIENCE_S)


class Held:
    """A job that stands for a block's memory. Runs at once."""

    def __call__(self) -> None:
        pass


def test_an_idle_scheduler_holds_on_to_nothing(wide: Desk) -> None:
    held = Held()
    gone = weakref.ref(held)
    wide.scheduler.submit(held, 1, 0.0)
    del held
    wait_until(lambda: gone() is None)


def test_threads_that_wait_for_bytes_hold_on_to_no_job(wide: Desk) -> None:
    wide.submit("full", nbytes=100)
    assert wide.next_begun() == "full"
    held = Held()
    gone = weakref.ref(held)
    job = wide.scheduler.submit(held, 50, 1.0)
    for deadline in range(2, 6):
        wide.submit("behind", deadline=float(deadline))
    for name in ("urgent", "more urgent"):
        _, urgent = wide.submit(name, nbytes=0, deadline=0.0)
        urgent.may_end.set()
        assert wide.next_begun() == name
    assert wide.scheduler.cancel(job)
    del held, job
    wait_until(lambda: gone() is None)


def test_cancelled_jobs_do_not_pile_up_behind_urgent_ones(desk: Desk) -> None:
    """Under steady load with near deadlines, far ones that are cancelled never come to the head of the queue."""
    kept: weakref.WeakSet[Held] = weakref.WeakSet()
    for _ in range(1000):
        held = Held()
        kept.add(held)
        assert desk.scheduler.cancel(desk.scheduler.submit(held, 1, inf))
    assert len(kept) < 100


def test_a_race_of_cancelling_and_beginning_has_one_winner() -> None:
    """Every job runs once or is cancelled once, never both, never neither."""
    scheduler = LoadScheduler(4, 1 << 20)
    ran: SimpleQueue[int] = SimpleQueue()
    cancelled: SimpleQueue[int] = SimpleQueue()
    each, callers = 400, 3

    def play(first: int) -> None:
        for number in range(first, first + each):
            job = scheduler.submit(lambda number=number: ran.put(number), 1, float(number % 7))  # type: ignore[misc]
            if number % 2:
                scheduler.hasten(job, 0.0)
            if scheduler.cancel(job):
                cancelled.put(number)

    threads = [threading.Thread(target=play, args=(n * each,)) for n in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dropped = scheduler.close()
    outcome = sorted([ran.get() for _ in range(ran.qsize())] + [cancelled.get() for _ in range(cancelled.qsize())])
    assert len(outcome) + len(dropped) == each * callers
    assert len(set(outcome)) == len(outcome)
    assert scheduler.running_bytes == scheduler.waiting_bytes == 0


def test_a_race_of_closing_and_submitting_loses_no_job() -> None:
    scheduler = LoadScheduler(2, 1 << 20)
    ran: SimpleQueue[int] = SimpleQueue()
    accepted: SimpleQueue[Job] = SimpleQueue()
    going = threading.Barrier(4)

    def play() -> None:
        going.wait()
        try:
            while True:
                accepted.put(scheduler.submit(lambda: ran.put(1), 1, 0.0))
        except Unavailable:
            pass

    threads = [threading.Thread(target=play) for _ in range(3)]
    for thread in threads:
        thread.start()
    going.wait()
    assert accepted.get(timeout=PATIENCE_S)
    dropped = scheduler.close()
    for thread in threads:
        thread.join()
    assert ran.qsize() + len(dropped) == accepted.qsize() + 1


@dataclass(eq=False)
class Planned:
    """The model of one job."""

    number: int
    nbytes: int
    deadline: float
    job: Job
    work: Work = field(repr=False)
    kind: str | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs begin exactly when a model says, which sorts all that wait and starts from the front what fits."""

    @initialize(threads=st.integers(1, 3), max_bytes=st.integers(1, 12))
    def open(self, threads: int, max_bytes: int) -> None:
        self.threads, self.max_bytes = threads, max_bytes
        self.scheduler = LoadScheduler(threads, max_bytes)
        self.begun: SimpleQueue[Work] = SimpleQueue()
        self.waiting: list[Planned] = []
        self.running: list[Planned] = []
        self.over: list[Planned] = []
        self.numbers = 0

    def settle(self) -> None:
        """Start in the model what can start, and wait until the scheduler has started the same."""
        expected = []
        while self.waiting and len(self.running) < self.threads:
            first = min(self.waiting, key=lambda planned: (planned.deadline, planned.number))
            if self.running and sum(p.nbytes for p in self.running) + first.nbytes > self.max_bytes:
                break
            self.waiting.remove(first)
            self.running.append(first)
            expected.append(first.work)
        assert {self.begun.get(timeout=PATIENCE_S) for _ in expected} == set(expected)

    @rule(
        nbytes=st.integers(0, 15),
        deadline=st.sampled_from([1.0, 2.0, 3.0, inf]),
        fails=st.booleans(),
        kind=st.sampled_from([None, "one", "other"]),
    )
    def submit(self, nbytes: int, deadline: float, fails: bool, kind: str | None) -> None:
        self.numbers += 1
        work = Work(self.begun, self.numbers, ValueError("broken") if fails else None)
        job = self.scheduler.submit(work, nbytes, deadline, kind=kind, subject=self.numbers)
        self.waiting.append(Planned(self.numbers, nbytes, deadline, job, work, kind))
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), most_bytes=st.integers(0, 30))
    def take_along(self, data: st.DataObject, most_bytes: int) -> None:
        leader = data.draw(st.sampled_from(self.running))
        expected = []
        for first in sorted(self.waiting, key=lambda planned: (planned.deadline, planned.number)):
            running_bytes = sum(p.nbytes for p in self.running)
            alike = leader.kind is not None and first.kind == leader.kind
            if not alike or leader.nbytes + first.nbytes > most_bytes or running_bytes + first.nbytes > self.max_bytes:
                break
            self.waiting.remove(first)
            self.over.append(first)
            leader.nbytes += first.nbytes
            expected.append(first.number)
        assert [job.subject for job in self.scheduler.take_along(leader.job, most_bytes)] == expected
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        planned = data.draw(st.sampled_from(self.running))
        self.running.remove(planned)
        self.over.append(planned)
        planned.work.may_end.set()
        self.settle()

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), deadline=st.sampled_from([0.0, 1.5, 2.5]))
    def hasten(self, data: st.DataObject, deadline: float) -> None:
        planned = data.draw(st.sampled_from(self.waiting + self.running + self.over))
        self.scheduler.hasten(planned.job, deadline)
        if planned in self.waiting:
            planned.deadline = min(planned.deadline, deadline)
        self.settle()

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        planned = data.draw(st.sampled_from(self.waiting + self.running + self.over))
        assert self.scheduler.cancel(planned.job) == (planned in self.waiting)
        if planned in self.waiting:
            self.waiting.remove(planned)
            self.over.append(planned)
        self.settle()

    @invariant()
    def figures_agree(self) -> None:
        assert self.begun.empty()
        assert self.scheduler.queued == len(self.waiting)
        assert self.scheduler.waiting_bytes == sum(planned.nbytes for planned in self.waiting)
        # An ended job's bytes are given back by its worker, a moment after the test let it end.
        wait_until(lambda: self.scheduler.running_bytes == sum(planned.nbytes for planned in self.running))

    def teardown(self) -> None:
        for planned in self.waiting + self.running:
            planned.work.may_end.set()
        by_urgency = sorted(self.waiting, key=lambda planned: (planned.deadline, planned.number))
        dropped = self.scheduler.close()
        assert dropped == [planned.job for planned in by_urgency][len(self.waiting) - len(dropped) :]
        assert self.begun.qsize() + len(dropped) == len(self.waiting)
        assert self.scheduler.running_bytes == self.scheduler.waiting_bytes == self.scheduler.queued == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
