"""The log of events: numbers without gaps, an honest account of what is not kept, and nobody woken in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.events import EventLog

KEYS = [bytes([number]) * 32 for number in range(8)]


def record(log: EventLog, keys: int) -> None:
    log.record("stored", b"tenant", b"namespace", KEYS[:keys], {})


@given(
    keys=st.lists(st.integers(0, 8), max_size=60),
    kept=st.integers(9, 40),
    since=st.integers(0, 60),
    most=st.integers(1, 30),
)
def test_a_reader_gets_what_is_kept_and_learns_what_is_not(keys: list[int], kept: int, since: int, most: int) -> None:
    log = EventLog(kept)
    for count in keys:
        record(log, count)
    since = min(since, log.last)
    events, missed = log.since(since, most)
    oldest = len(keys)
    size = 0
    while oldest and size + 1 + keys[oldest - 1] <= kept:
        oldest -= 1
        size += 1 + keys[oldest]
    assert missed == max(0, oldest - since)
    expected = range(max(since, oldest) + 1, len(keys) + 1)[:most]
    assert [event.sequence for event in events] == list(expected)
    assert [len(event.keys) for event in events] == [keys[number - 1] for number in expected]


def test_waiting_ends_with_the_next_event() -> None:
    log = EventLog()
    early, other = log.after(0), log.after(0)
    assert not early.done()
    assert other.cancel()
    record(log, 1)
    assert early.done()
    assert log.after(0).done()
    assert not log.after(1).done()


def test_those_who_gave_up_are_forgotten() -> None:
    log = EventLog()
    for _ in range(100):
        log.after(0).cancel()
    assert len(log._waiting) <= 1
