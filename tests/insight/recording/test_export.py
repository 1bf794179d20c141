"""Export: one trace that says the same about reuse as what was recorded, and nothing about whom it is of."""

from __future__ import annotations

import gzip
import json
import stat
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidRequest, StorageError, TierKVError
from tierkv.insight.traces.export import export, regrouped
from tierkv.insight.traces.row import Row
from tierkv.replay.trace import read_trace


def recorded(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp: int, blocks: list[int], block_tokens: int = 16, **more: Any) -> dict[str, Any]:
    length = len(blocks) * block_tokens
    named = {"timestamp": timestamp, "input_length": length, "output_length": 1, "hash_ids": blocks}
    return {**named, "block_tokens": block_tokens, **more}


def exported(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def test_files_of_several_daemons_become_one_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    recorded(trace / "trace-1.jsonl", row(1_000_500, [90, 91], session_id="aa", tenant="t1"), row(1_004_000, [90, 95]))
    other = recorded(tmp_path / "b.jsonl", row(1_002_000, [90, 91, 70], session_id="aa", tenant="t1"))
    made = export([trace, other], tmp_path / "out.jsonl")
    assert (made.requests, made.blocks, made.block_tokens, made.seconds, made.cut_lines) == (3, 4, 16, 3.5, 0)
    first, second, third = exported(tmp_path / "out.jsonl")
    assert [r["timestamp"] for r in (first, second, third)] == [0, 1500, 3500]
    assert [r["hash_ids"] for r in (first, second, third)] == [[0, 1], [0, 1, 2], [0, 3]]
    assert first["session_id"] == second["session_id"] != "aa"
    assert first["tenant"] == second["tenant"] != "t1"
    assert set(third) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o600


def test_two_exports_cannot_be_joined(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", row(5, [1, 2], session_id="aa", tenant="t1"))
    for name in ("one", "two"):
        export([source], tmp_path / name)
    (one,), (two,) = exported(tmp_path / "one"), exported(tmp_path / "two")
    assert one["session_id"] != two["session_id"]
    assert one["tenant"] != two["tenant"]


def test_tenants_and_sessions_can_be_left_out(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", row(5, [1, 2], session_id="aa", tenant="t1"))
    export([source], tmp_path / "out.gz", tenants=False, sessions=False)
    assert exported(tmp_path / "out.gz") == [
        {"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [0, 1]}
    ]


def test_time_is_cut(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", *(row(1000 * at, [at]) for at in (7, 3, 4, 5, 9)))
    made = export([source], tmp_path / "out", skip_s=1.0, seconds=3.0)
    assert [r["timestamp"] for r in exported(tmp_path / "out")] == [0, 1000]
    assert (made.requests, made.seconds) == (2, 1.0)


CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=8)


@given(CHAINS, st.integers(1, 4))
def test_larger_blocks_are_equal_where_all_their_parts_are(chains: list[list[int]], parts: int) -> None:
    """A block's id stands for all before it, too, as those of a recording do."""
    ids: dict[tuple[int, ...], int] = {}

    def chained(numbers: list[int]) -> list[int]:
        return [ids.setdefault(tuple(numbers[: end + 1]), len(ids)) for end in range(len(numbers))]

    rows = [Row(0, array("q", chained(chain)), 4 * len(chain), 4) for chain in chains]
    larger = [regrouped(row, 4 * parts) for row in rows]
    for row, group in zip(rows, larger, strict=True):
        assert (group.tokens, group.block_tokens) == (row.tokens, 4 * parts)
        assert len(group.blocks) == -(-len(row.blocks) // parts)
    for (a, large_a), (b, large_b) in pairwise(zip(chains, larger, strict=True)):
        common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        same = next((n for n, (x, y) in enumerate(zip(large_a.blocks, large_b.blocks, strict=False)) if x != y), None)
        whole = common // parts
        if same is not None:
            assert same == whole
        else:
            assert min(len(large_a.blocks), len(large_b.blocks)) <= whole + (a == b)


def test_what_was_exported_in_larger_blocks_can_be_replayed(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", row(1, [1, 2, 3, 4, 5]), row(2, [1, 2, 3, 4]), row(3, [1, 2], 32))
    with pytest.raises(InvalidRequest, match="blocks of 16, 32 tokens"):
        export([source], tmp_path / "out")
    with pytest.raises(InvalidRequest, match="blocks of 48 tokens"):
        export([source], tmp_path / "out", block_tokens=48)
    made = export([source], tmp_path / "out", block_tokens=64)
    assert made.block_tokens == 64
    trace = read_trace(tmp_path / "out", 64)
    assert [(request.tokens, len(request.blocks)) for request in trace.requests] == [(80, 2), (64, 1), (64, 1)]


def test_a_public_trace_is_one_of_large_blocks(tmp_path: Path) -> None:
    public = {"timestamp": 3, "input_length": 700, "output_length": 52, "hash_ids": [46, 47], "session_id": 0}
    recorded(tmp_path / "a.jsonl", public)
    assert export([tmp_path / "a.jsonl"], tmp_path / "out").block_tokens == 512
    (row,) = exported(tmp_path / "out")
    assert (row["input_length"], row["output_length"], row["hash_ids"]) == (700, 52, [0, 1])


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", row(1, [1]), row(2, [1]))
    source.write_text(source.read_text()[:-9])
    assert (made := export([source], tmp_path / "out")).requests == 1
    assert made.cut_lines == 1


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b'{"timestamp": 1}\n', InvalidRequest, "a.jsonl:1"),
        (b"[]\n", InvalidRequest, "a.jsonl:1"),
        (b'{"timestamp": 1, "input_length": 17, "hash_ids": [1], "block_tokens": 16}\n', InvalidRequest, "17 tokens"),
        (b'{"timestamp": 1, "input_length": 16, "hash_ids": ["x"], "block_tokens": 16}\n', InvalidRequest, "a.jsonl:1"),
        (b'{"timestamp": NaN, "input_length": 0, "hash_ids": []}\n', InvalidRequest, "a.jsonl:1"),
        (b"", InvalidRequest, "no requests"),
        (gzip.compress(b"{}" * 99)[:-9], StorageError, "a.jsonl"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, content: bytes, error: type[TierKVError], words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(error, match=words) as raised:
        export([tmp_path / "a.jsonl"], tmp_path / "out")
    assert raised.value.remedy
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = recorded(tmp_path / "a.jsonl", row(1, [1]))
    with pytest.raises(StorageError, match="exists"):
        export([source], source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no traces"):
        export([tmp_path / "empty"], tmp_path / "out")
    with pytest.raises(StorageError, match="absent"):
        export([tmp_path / "absent"], tmp_path / "out")
