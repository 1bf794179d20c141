"""Prompts as pieces: nothing is lost in cutting, values are found, spellings of one meaning are told."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.insight.lint.logs import words
from tests.insight.lint.oracle import hit_tokens
from tierkv.insight.lint.command import lint_log
from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.readers.log import open_log
from tierkv.insight.lint.text.pieces import cut
from tierkv.insight.lint.text.tokenise import Approximation


def kinds(text: str) -> dict[str, Kind]:
    return {piece.text: piece.kind for piece in cut(text, Kind.TEXT)}


@given(st.text(alphabet=st.sampled_from('ab1 \n.{}[]":,<>/2026-03#é'), max_size=300))
@settings(max_examples=200, deadline=None)
def test_pieces_and_tokens_cover_the_text(text: str) -> None:
    pieces = cut(text, Kind.TEXT)
    assert "".join(piece.text for piece in pieces) == text
    counts = [tokens.size for tokens in Approximation().encode([piece.text for piece in pieces])]
    assert all(counts)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2026-03-01", Kind.CLOCK),
        ("2026-03-01T10:20:30.5Z", Kind.CLOCK),
        ("Monday, March 2nd, 2026", Kind.CLOCK),
        ("2 Mar 2026", Kind.CLOCK),
        ("10:20 PM", Kind.CLOCK),
        ("1772359200", Kind.CLOCK),
        ("123e4567-e89b-12d3-a456-426614174000", Kind.IDENTIFIER),
        ("req_9fK2mQ81xZ", Kind.IDENTIFIER),
        ("deadbeef0123", Kind.IDENTIFIER),
    ],
)
def test_values_stand_apart(value: str, kind: Kind) -> None:
    assert kinds(f"It says {value} here.\n")[value] is kind


@pytest.mark.parametrize("text", ["Request #17\n", "turn: 17\n", "session id = 17\n", "Order no. 17\n"])
def test_counters_stand_apart(text: str) -> None:
    assert kinds(text)["17"] is Kind.COUNTER


@pytest.mark.parametrize("text", ["There are 17 apples.\n", "Pi is 3.14159.\n", "version 2.0 of a-b-c\n"])
def test_other_numbers_are_text(text: str) -> None:
    assert set(kinds(text).values()) == {Kind.TEXT}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a  line\r\n\r\nnext\n", "a line\nnext\n"),
        ('Data: {"a": 1, "b": [2, 3], "c": "x"}\n', 'Data: {"c":"x","b":[2,3],"a":1}\n'),
    ],
)
def test_spellings_of_one_meaning_mean_the_same(one: str, other: str) -> None:
    meanings = [[piece.meaning for piece in cut(text, Kind.TEXT)] for text in (one, other)]
    assert meanings[0] == meanings[1]


def test_a_number_of_a_document_is_not_part_of_it() -> None:
    text = "Sources\n[1] first text\nmore\n[2] second text\n\nQuestion: what?\n"
    documents = [piece.text for piece in cut(text, Kind.TEXT) if piece.kind is Kind.DOCUMENT]
    assert documents == ["] first text\nmore", "] second text"]


def test_text_cut_into_other_tokens_is_found(tokenizer: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    rng = random.Random(31)
    shared = words(rng, 500)
    rows, clean = [], []
    for number in range(90):
        question, at = words(rng, 30), rng.randrange(300, 500)
        clean.append(encode(f"{shared}\nQ: {question}").ids)
        joined = encode(shared[:at]).ids + encode(f"{shared[at:]}\nQ: {question}").ids
        rows.append(joined if number % 3 == 1 else clean[-1])
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with open_log(path) as log:
        report = lint_log(log, tokenizer=tokenizer)
    assert report.findings[0].cause == "tokeniser-boundary"
    assert report.findings[0].lost_tokens == pytest.approx(hit_tokens(clean) - hit_tokens(rows), rel=0.02)


def test_a_tokenizer_counts_the_models_own_tokens(tokenizer: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = words(random.Random(32), 100)
    (tmp_path / "log").write_text(json.dumps(text) + "\n")
    with open_log(tmp_path / "log") as log:
        report = lint_log(log, tokenizer=tokenizer)
        approximate = lint_log(log)
    assert report.prompt_tokens == len(tokenizers.Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    assert report.exact
    assert not approximate.exact
    assert "approximation" in approximate.tokeniser
