"""Trace files: what is read, and how mistakes are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import InvalidRequest, StorageError
from tierkv.replay.trace import Request, read_trace


def line(timestamp: float, tokens: int, blocks: list[int], **more: Any) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "hash_ids": blocks, **more})


GOOD = [
    line(30, 700, [1, 2], session_id=4, output_length=3),
    line(10.5, 512, [1], session_id="x"),
    "",
    line(30, 1, [3]),
    line(10.5, 513, [1, 4]),
    line(40, 0, []),
]


@pytest.mark.parametrize("zipped", [False, True])
def test_requests_come_by_time_and_those_of_one_time_as_they_stand(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "trace"
    data = "\n".join(GOOD).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    trace = read_trace(path)
    assert trace.requests == (
        Request(10.5, 512, (1,), "x"),
        Request(10.5, 513, (1, 4)),
        Request(30, 700, (1, 2), 4),
        Request(30, 1, (3,)),
        Request(40, 0, ()),
    )
    assert (trace.prompt_tokens(), trace.references(), trace.unique_blocks()) == (1726, 6, 4)
    assert [trace.tokens(trace.requests[2], hits) for hits in (0, 1, 2)] == [0, 512, 700]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not a JSON object"]),
        ("[1]", ["not a JSON object"]),
        ("[" * 100_000, ["not a JSON object"]),
        ("\xff", ["not a JSON object"]),
        ('{"input_length": 3, "hash_ids": [1]}', ["'timestamp'"]),
        (line(True, 3, [1]), ["'timestamp'"]),
        ('{"timestamp": NaN, "input_length": 3, "hash_ids": [1]}', ["'timestamp'"]),
        (line(1, -3, []), ["'input_length'"]),
        ('{"timestamp": 1, "input_length": 3.5, "hash_ids": [1]}', ["'input_length'"]),
        ('{"timestamp": 1, "input_length": 3, "hash_ids": 1}', ["'hash_ids'"]),
        ('{"timestamp": 1, "input_length": 3, "hash_ids": ["a"]}', ["'hash_ids'"]),
        (line(1, 3, [1], session_id=[2]), ["'session_id'"]),
        (line(1, 513, [1]), ["513 tokens do not make 1 blocks of 512", "--block-tokens"]),
        (line(1, 512, [1, 2]), ["512 tokens do not make 2 blocks"]),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{GOOD[0]}\n\n{text}\n".encode("latin-1"))
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert all(word in str(caught.value) for word in [f"{path}:3", *words]), caught.value


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(GOOD * 500).encode())
    for number, data in enumerate([whole[: len(whole) // 2], whole[:-8] + bytes(8)]):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match=f"{path}:.*damaged"):
            read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StorageError, match=str(path)):
            read_trace(path)
