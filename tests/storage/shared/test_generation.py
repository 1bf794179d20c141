"""The rules by which nodes agree what was cleared and deleted, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.tier_suite import key_of
from tierkv.storage.shared.generation import MOST_DELETED, Document, decide, decode, encode
from tierkv.storage.shared.known import Known, load, save

TOKEN, OTHER = b"8 bytes!", b"another!"
A, B, C = (key_of(number) for number in range(3))
documents = st.builds(
    Document,
    st.integers(1, 5),
    st.sampled_from([TOKEN, OTHER]),
    st.lists(st.sampled_from([A, B, C]), max_size=4).map(tuple),
)


def both(
    known: Document | None, found: Document | None, *, clear: bool = False, forget: tuple[bytes, ...] = ()
) -> tuple[Document, Document]:
    return decide(known, found, damaged=False, clear=clear, forget=forget)


def test_the_first_node_begins_the_first_generation() -> None:
    others, wanted = both(None, None)
    assert others == wanted
    assert (wanted.count, wanted.deleted) == (1, ())
    assert both(None, None)[1].token != wanted.token


def test_a_new_node_takes_over_what_there_is() -> None:
    found = Document(3, TOKEN, (A,))
    assert both(None, found) == (found, found)


def test_a_lost_document_is_put_back() -> None:
    known = Document(3, TOKEN, (A,))
    assert both(known, None) == (known, known)


@pytest.mark.parametrize("found", [Document(3, TOKEN, (A, B)), Document(4, OTHER), Document(4, TOKEN, (C,))])
def test_what_others_made_of_it_counts(found: Document) -> None:
    assert both(Document(3, TOKEN, (A,)), found) == (found, found)


@pytest.mark.parametrize(
    "found",
    [Document(2, TOKEN), Document(3, OTHER), Document(3, TOKEN), Document(3, TOKEN, (B,)), Document(3, OTHER, (A,))],
)
def test_of_two_histories_neither_counts(found: Document) -> None:
    _, wanted = both(Document(3, TOKEN, (A,)), found)
    assert wanted.count == 4
    assert wanted.token not in (TOKEN, OTHER)


def test_a_clear_is_above_whatever_was_found() -> None:
    for found in (None, Document(3, TOKEN), Document(9, OTHER)):
        others, wanted = both(Document(3, TOKEN), found, clear=True)
        assert wanted.count == others.count + 1
        assert others == (found or Document(3, TOKEN))


def test_deletions_are_appended() -> None:
    others, wanted = both(Document(3, TOKEN), Document(3, TOKEN, (A,)), forget=(B, A))
    assert others.deleted == (A,)
    assert wanted == Document(3, TOKEN, (A, B, A))
    assert wanted.deleted_at == {B: 2, A: 3}


def test_too_many_deletions_begin_a_new_generation() -> None:
    full = Document(3, TOKEN, (A,) * MOST_DELETED)
    assert both(full, full, forget=(B,))[1].count == 4
    almost = Document(3, TOKEN, (A,) * (MOST_DELETED - 1))
    assert both(almost, almost, forget=(B,))[1].deleted[-1] == B


def test_a_damaged_document_is_a_history_nobody_knows() -> None:
    others, wanted = decide(Document(3, TOKEN, (A,)), None, damaged=True, clear=False, forget=())
    assert others == wanted
    assert wanted.count == 4


@given(
    st.one_of(st.none(), documents), st.one_of(st.none(), documents), st.booleans(), st.lists(st.sampled_from([A, B]))
)
def test_nothing_that_was_known_to_be_gone_comes_back(
    known: Document | None, found: Document | None, clear: bool, forget: list[bytes]
) -> None:
    _, wanted = both(known, found, clear=clear, forget=tuple(forget))
    for before in (known, found):
        if before is None:
            continue
        assert wanted.count >= before.count
        if wanted.generation == before.generation:
            assert not clear
            assert wanted.deleted[: before.edition] == before.deleted
    if known is not None and wanted.generation == known.generation and not clear:
        assert set(forget) <= set(wanted.deleted)


@given(documents)
def test_a_document_survives_being_stored(document: Document) -> None:
    assert decode(encode(document)) == document


@given(st.binary(max_size=60))
def test_anything_else_is_no_document(data: bytes) -> None:
    assert decode(data) is None


def test_a_changed_byte_makes_no_document() -> None:
    data = encode(Document(3, TOKEN, (A,)))
    for at in range(len(data)):
        assert decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_what_is_known_survives_in_a_file_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "known"
    areas = [
        Known(b"tenant-1", key_of(8), Document(3, TOKEN, (A,)), True, (B, C), False, (A,)),
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
    save(path, [Known(b"tenant-1", key_of(8), Document(3, TOKEN))])
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], whole[:30] + b"x" + whole[31:]):
        caplog.clear()
        path.write_bytes(damaged)
        assert load(path) == []
        assert "is damaged" in caplog.text
