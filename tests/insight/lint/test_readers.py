"""Formats: found out, read, and refused with file, line and remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.insight.lint import logs
from tierkv.errors import ConfigError, InvalidRequest, StorageError
from tierkv.insight.lint.command import lint_log
from tierkv.insight.lint.readers.entry import Entry, Format
from tierkv.insight.lint.readers.log import open_log
from tierkv.insight.lint.text.prompt import render

MESSAGES = [{"role": "user", "content": "hello"}]
CONVERSATION = {"id": "c", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2}
MOONCAKE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}


def entries(
    tmp_path: Path, text: str, kind: Format | None = None, skip_bad: bool = False
) -> tuple[Format, list[Entry]]:
    path = tmp_path / "log"
    path.write_text(text)
    with open_log(path, kind, skip_bad) as log:
        return log.format, list(log.entries())


@pytest.mark.parametrize(
    ("row", "kind", "count"),
    [
        ({"messages": MESSAGES}, Format.OPENAI, 1),
        ({"custom_id": "1", "method": "POST", "body": {"messages": MESSAGES}}, Format.OPENAI, 1),
        ({"system": "s", "messages": MESSAGES}, Format.ANTHROPIC, 1),
        (CONVERSATION, Format.SHAREGPT, 2),
        ("a prompt", Format.TEXT, 1),
        ({"prompt": "a prompt"}, Format.TEXT, 1),
        ([1, 2, 3], Format.TOKENS, 1),
        ({"prompt_token_ids": [1, 2, 3]}, Format.TOKENS, 1),
        ({"prompt": [1, 2, 3]}, Format.TOKENS, 1),
        (MOONCAKE, Format.MOONCAKE, 1),
    ],
)
def test_the_format_is_found_out(tmp_path: Path, row: Any, kind: Format, count: int) -> None:
    found, read = entries(tmp_path, "\n" + json.dumps(row) + "\n")
    assert (found, len(read)) == (kind, count)
    assert {entry.line for entry in read} == {2}


def test_lines_that_are_no_json_are_prompts(tmp_path: Path) -> None:
    kind, read = entries(tmp_path, "[10:02] hello\n\nsecond {prompt}\n")
    assert kind is Format.TEXT
    assert [(entry.line, entry.body) for entry in read] == [(1, "[10:02] hello"), (3, "second {prompt}")]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_is_a_log_too(tmp_path: Path, indent: int | None) -> None:
    kind, read = entries(tmp_path, json.dumps([CONVERSATION, CONVERSATION], indent=indent))
    assert (kind, len(read)) == (Format.SHAREGPT, 4)


def test_a_conversation_is_one_request_for_each_answer(tmp_path: Path) -> None:
    _, read = entries(tmp_path, json.dumps(CONVERSATION))
    assert [len(entry.body["messages"]) for entry in read] == [1, 3]  # type: ignore[call-overload, index]


def test_mooncake_blocks_are_512_tokens(tmp_path: Path) -> None:
    _, (entry,) = entries(tmp_path, json.dumps(MOONCAKE))
    assert isinstance(entry.body, np.ndarray)
    assert entry.body.tolist() == [*range(3 * 512, 4 * 512), *range(9 * 512, 9 * 512 + 188)]


def test_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b'"a prompt"\n'))
    with open_log(path) as log:
        assert [entry.body for entry in log.entries()] == ["a prompt"]


def test_a_rendered_request_has_tools_then_system_then_messages() -> None:
    blocks = [{"type": "text", "text": "look"}, {"type": "tool_result", "content": "found"}]
    prompt = render({"system": "rules", "tools": [{"name": "t"}], "messages": [{"role": "user", "content": blocks}]})
    text = prompt.text()
    assert [text.index(word) for word in ('"t"', "rules", "look", "found")] == sorted(
        text.index(word) for word in ('"t"', "rules", "look", "found")
    )
    assert [part.place for part in prompt.parts if part.path] == [
        *("the tools", "the system prompt", "the first message (user)", "the first message (user)")
    ]


@pytest.mark.parametrize(
    "line", ["{", '{"messages": 3}', '{"messages": [3]}', '{"messages": [{"content": [3]}]}', "[1]"]
)
def test_a_bad_line_is_named_and_only_skipped_on_demand(tmp_path: Path, line: str) -> None:
    good = json.dumps({"messages": MESSAGES})
    text = f"{good}\n{line}\n{good}\n"
    with pytest.raises(InvalidRequest, match=r"log:2: ") as error:
        entries(tmp_path, text)
    assert "--skip-bad" in error.value.remedy
    assert len(entries(tmp_path, text, skip_bad=True)[1]) == 2


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Format.TOKENS, "[1, -2]"),
        (Format.TOKENS, "[1, true]"),
        (Format.MOONCAKE, '{"hash_ids": [1], "input_length": 600}'),
        (Format.SHAREGPT, '{"conversations": [{"from": "who", "value": "x"}]}'),
        (Format.TEXT, '{"other": 1}'),
        (Format.ANTHROPIC, '{"system": 3, "messages": []}'),
    ],
)
def test_a_forced_format_refuses_what_is_not_it(tmp_path: Path, kind: Format, line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"log:1: "):
        entries(tmp_path, line, kind)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'"a"\n"\xff"\n')
    with open_log(path) as log, pytest.raises(InvalidRequest, match="log:2: not UTF-8 at byte 1"):
        list(log.entries())


def test_nothing_and_nowhere_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing in it"):
        entries(tmp_path, "\n\n")
    with pytest.raises(StorageError, match="cannot read"), open_log(tmp_path / "missing"):
        pass


def ids() -> list[list[int]]:
    rows: list[list[int]] = logs.ids_with_a_value().rows
    return rows[:60]


def test_arrays_hold_the_same_log_as_lists(tmp_path: Path) -> None:
    rows = [row[: len(row) - 7 * (number % 3)] for number, row in enumerate(ids())]
    padded = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    np.save(tmp_path / "log.npy", padded)
    flat = np.concatenate([np.array(row, np.uint32) for row in rows])
    np.savez_compressed(tmp_path / "log.npz", tokens=flat, lengths=[len(row) for row in rows])
    (tmp_path / "log.jsonl").write_text(logs.write(rows))
    figures = []
    for name in ("log.npy", "log.npz", "log.jsonl"):
        with open_log(tmp_path / name) as log:
            report = lint_log(log)
        figures.append((report.requests, report.prompt_tokens, report.hit_tokens, report.findings[0].cause))
    assert figures[0] == figures[1] == figures[2]
    assert figures[0][3] == "changing-value"


@pytest.mark.parametrize("array", [np.zeros(3, np.int32), np.zeros((2, 2)), np.array([[1, -1, 2]])])
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    np.save(tmp_path / "log.npy", array)
    with open_log(tmp_path / "log.npy") as log, pytest.raises(InvalidRequest, match=r"log\.npy"):
        lint_log(log)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a prompt\n")
    with open_log(tmp_path / "log") as log, pytest.raises(ConfigError, match="no tokenizer at"):
        lint_log(log, tokenizer=tmp_path)
