"""The rules by which nodes agree what was cleared and deleted, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.tier_suite import key_of
from tierkv.storage.shared.generation import MOST_ANCESTORS, MOST_DELETED, Deletion, Document, decide, decode, encode
from tierkv.storage.shared.known import Known, load, save

FIRST, TOKEN, OTHER, NEXT = b"the 1st!", b"8 bytes!", b"another!", b"the next"
A, B, C = (key_of(number) for number in range(3))


def document(token: bytes, *deleted: bytes, after: tuple[bytes, ...] = (FIRST,), by: int = 1) -> Document:
    """A document in which one node deleted all of these, one after the other."""
    deletions = [Deletion(key, (by << 32) + at) for at, key in enumerate(deleted, 1)]
    return Document(token, after, tuple(deletions))


def deleted(document: Document) -> tuple[bytes, ...]:
    return tuple(deletion.key for deletion in document.deletions)


tokens = st.sampled_from([FIRST, TOKEN, OTHER, NEXT])
documents = st.builds(
    lambda token, keys, after, by: document(token, *keys, after=tuple(after), by=by),
    tokens,
    st.lists(st.sampled_from([A, B, C]), max_size=4),
    st.lists(tokens, max_size=3, unique=True),
    st.integers(1, 2),
)


def both(
    known: Document | None, found: Document | None, *, clear: bool = False, forget: tuple[bytes, ...] = ()
) -> tuple[Document, Document]:
    return decide(known, found, damaged=False, clear=clear, forget=forget)


def test_the_first_node_begins_the_first_generation() -> None:
    others, wanted = both(None, None)
    assert others == wanted
    assert (wanted.ancestors, wanted.deletions) == ((), ())
    assert both(None, None)[1].token != wanted.token


def test_a_new_node_takes_over_what_there_is() -> None:
    found = document(TOKEN, A)
    assert both(None, found) == (found, found)


def test_a_lost_document_is_put_back() -> None:
    known = document(TOKEN, A)
    assert both(known, None) == (known, known)


@pytest.mark.parametrize(
    "found", [document(TOKEN, A, B), document(OTHER, after=(FIRST, TOKEN)), document(OTHER, C, after=(TOKEN, NEXT))]
)
def test_what_others_made_of_it_counts(found: Document) -> None:
    assert both(document(TOKEN, A), found) == (found, found)


@pytest.mark.parametrize(
    "found",
    [
        document(FIRST, after=()),  # what it was before
        document(OTHER),  # another child of the same
        document(OTHER, after=()),
        document(OTHER, A),
        document(TOKEN),
        document(TOKEN, B),
        document(TOKEN, A, by=2),  # the same block, but deleted by another node, later
    ],
)
def test_of_two_histories_neither_counts(found: Document) -> None:
    known = document(TOKEN, A)
    others, wanted = both(known, found)
    assert others == wanted
    assert wanted.token not in (FIRST, TOKEN, OTHER)
    assert wanted.follows(known)
    assert wanted.follows(found)
    for one in (known, found):
        assert both(one, wanted) == (wanted, wanted)  # for all who knew either


def test_a_clear_is_after_whatever_was_found() -> None:
    known = document(TOKEN)
    for found in (None, known, document(OTHER), document(NEXT, after=(FIRST, TOKEN))):
        others, wanted = both(known, found, clear=True)
        assert wanted.follows(others)
        assert wanted.follows(known)
        assert found is None or wanted.follows(found)
        assert others == (found or known) or found == document(OTHER)


def test_who_was_away_for_many_clears_makes_one_more() -> None:
    known = latest = document(TOKEN)
    for _ in range(MOST_ANCESTORS):
        latest = both(latest, latest, clear=True)[1]
        assert both(known, latest) == (latest, latest)
    latest = both(latest, latest, clear=True)[1]
    assert len(latest.ancestors) == MOST_ANCESTORS
    wanted = both(known, latest)[1]
    assert wanted.follows(known)
    assert wanted.follows(latest)


def test_deletions_are_appended() -> None:
    others, wanted = both(document(TOKEN), document(TOKEN, A), forget=(B, A))
    assert others == document(TOKEN, A)
    assert wanted.continues(others)
    assert deleted(wanted) == (A, B, A)
    assert len({0, *(deletion.mark for deletion in wanted.deletions)}) == 4


def test_a_block_is_gone_unless_its_writer_knew_of_its_deletion() -> None:
    history = document(TOKEN, A, B, A)
    marks = [document(TOKEN, *keys).mark for keys in ((), (A,), (A, B), (A, B, A))]
    assert [history.deletes(A, mark) for mark in marks] == [True, True, True, False]
    assert [history.deletes(B, mark) for mark in marks] == [True, True, False, False]
    assert [history.deletes(C, mark) for mark in marks] == [False] * 4
    stranger = document(TOKEN, A, B, A, by=2).mark
    assert [history.deletes(key, stranger) for key in (A, B, C)] == [True, True, False]


def test_too_many_deletions_begin_a_new_generation() -> None:
    full = document(TOKEN, *[A] * MOST_DELETED)
    assert both(full, full, forget=(B,))[1].follows(full)
    almost = document(TOKEN, *[A] * (MOST_DELETED - 1))
    assert deleted(both(almost, almost, forget=(B,))[1])[-1] == B


def test_a_damaged_document_is_a_history_nobody_knows() -> None:
    known = document(TOKEN, A)
    others, wanted = decide(known, None, damaged=True, clear=False, forget=())
    assert others == wanted
    assert wanted.follows(known)


@given(
    st.one_of(st.none(), documents), st.one_of(st.none(), documents), st.booleans(), st.lists(st.sampled_from([A, B]))
)
def test_nothing_that_was_known_to_be_gone_comes_back(
    known: Document | None, found: Document | None, clear: bool, forget: list[bytes]
) -> None:
    others, wanted = both(known, found, clear=clear, forget=tuple(forget))
    for before in (known, found):
        if before is not None:
            assert others.continues(before) or others.follows(before)
            assert wanted.follows(before) if clear else wanted.continues(before) or wanted.follows(before)
    assert wanted.follows(others) if clear else set(forget) <= set(deleted(wanted))


@given(documents)
def test_a_document_survives_being_stored(document: Document) -> None:
    assert decode(encode(document)) == document


@given(st.binary(max_size=60))
def test_anything_else_is_no_document(data: bytes) -> None:
    assert decode(data) is None


def test_a_changed_byte_makes_no_document() -> None:
    data = encode(document(TOKEN, A))
    for at in range(len(data)):
        assert decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_what_is_known_survives_in_a_file_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "known"
    areas = [
        Known(b"tenant-1", key_of(8), document(TOKEN, A), True, (B, C), False, (A,)),
        Known(b"tenant-2", key_of(9)),
    ]
    assert load(path) == []
    save(path, areas)
    save(path, areas)
    assert load(path) == areas
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["known"]


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "known"
    save(path, [Known(b"tenant-1", key_of(8), document(TOKEN))])
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], whole[:30] + b"x" + whole[31:]):
        caplog.clear()
        path.write_bytes(damaged)
        assert load(path) == []
        assert "is damaged" in caplog.text
