"""Which sessions a trace has, and what nobody asks for again when one ends."""

from __future__ import annotations

from tests.replay import simulators as slow
from tierkv.replay.sessions import infer_sessions, session_ends
from tierkv.replay.trace import Request, Trace

BLOCK = 4


def trace(*requests: tuple[int | str | None, list[int], int]) -> Trace:
    """Requests of a session, its blocks, and the tokens of the last one."""
    return Trace(
        tuple(
            Request(number, BLOCK * (len(blocks) - 1) + last, tuple(blocks), session)
            for number, (session, blocks, last) in enumerate(requests)
        ),
        BLOCK,
    )


def test_a_session_ends_with_its_last_request() -> None:
    told = trace(("a", [1, 2], 4), ("b", [1, 3], 4), ("a", [1, 2, 4], 4), ("b", [1, 3, 5], 4))
    assert session_ends(told) == [(), (), (2, 4), (1, 3, 5)]


def test_all_blocks_of_a_session_go_not_only_the_last_chain() -> None:
    told = trace(("a", [1, 2, 3], 2), ("a", [1, 2, 4], 4))
    assert session_ends(told) == [(), (1, 2, 3, 4)]


def test_blocks_that_another_living_session_used_stay() -> None:
    told = trace(("a", [1, 2, 3], 4), ("b", [1, 2, 3], 4), ("a", [1, 2, 3, 9], 4), ("b", [1], 4))
    assert session_ends(told) == [(), (), (9,), (1, 2, 3)]


def test_a_session_of_one_request_ends_at_once() -> None:
    assert session_ends(trace(("a", [1, 2], 4), ("b", [1, 2], 4))) == [(1, 2), (1, 2)]


def test_sessions_are_inferred_where_one_request_names_none() -> None:
    told = trace((7, [1, 2], 4), (None, [1, 2, 3], 4), (7, [8], 4))
    assert infer_sessions(told) == [0, 0, 1]
    assert session_ends(told) == [(), (1, 2, 3), (8,)]


def test_chains_that_extend_each_other_are_a_session() -> None:
    told = trace(
        (None, [1, 2, 3], 4),
        (None, [1, 4, 5, 6], 4),  # begins like the first, but repeats less than half of it
        (None, [1, 2, 3, 7], 2),
        (None, [1, 2, 3, 8, 9], 4),  # its partial block was filled up, and so is another one now
        (None, [1, 4, 5, 10], 4),  # asked again from an earlier turn
        (None, [11], 4),
    )
    assert infer_sessions(told) == [0, 1, 0, 0, 1, 2]


def test_a_shared_beginning_joins_nobody() -> None:
    shared = [1, 2, 3, 4]
    told = trace(
        *((None, [*shared, number, number + 1, number + 2, number + 3, number + 4], 4) for number in (10, 20, 30))
    )
    assert len(set(infer_sessions(told))) == 3


def test_inference_finds_the_sessions_of_a_generated_trace() -> None:
    told = slow.generated_trace(5)
    inferred = infer_sessions(told)
    pairs = set(zip([request.session for request in told.requests], inferred, strict=True))
    # Few sessions fall apart, and few are taken for one.
    assert len(pairs) < 1.2 * len(set(inferred))
    assert len(pairs) < 1.2 * 60
