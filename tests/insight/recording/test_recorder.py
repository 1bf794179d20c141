"""The recorder: what is in a row, what is not, who is told, and what is missing."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.insight.live.support import BLOCK_TOKENS, numbered
from tests.insight.recording.support import recording
from tierkv.errors import StorageError
from tierkv.insight.traces import recorder as module
from tierkv.insight.traces.export import export
from tierkv.insight.traces.files import TraceFiles


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]


def test_a_row_says_what_was_asked_for_in_hashes_only(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as running:
        running.ask([1, 2, 3], "ada-lovelace", "conversation")
        running.ask([1, 2, 9], "ada-lovelace", "conversation")
        running.ask([1, 2, 3], "bob")
        running.ask([])
        key = running.cache.engine.tenant("ada-lovelace").key
    first, second, third = lines(tmp_path / "trace")
    assert (first["input_length"], first["output_length"], first["block_tokens"]) == (3 * BLOCK_TOKENS, 1, BLOCK_TOKENS)
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    assert first["hash_ids"][2] != second["hash_ids"][2]
    assert not set(first["hash_ids"]) & set(third["hash_ids"]), "tenants have no block in common"
    assert max(first["hash_ids"]) < 2**53
    assert first["session_id"] == second["session_id"]
    assert first["tenant"] == second["tenant"] != third["tenant"]
    assert "session_id" not in third
    assert 0 <= second["timestamp"] - first["timestamp"] < 60_000
    text = next((tmp_path / "trace").iterdir()).read_text()
    for secret in ("lovelace", "bob", "conversation", numbered([1]).hashes[0].hex(), key.hex()):
        assert secret not in text


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as running:
        running.ask([1])
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "trace").iterdir()] == [0o600]


def test_names_are_the_same_after_a_restart_and_with_another_secret_all_others(tmp_path: Path) -> None:
    for name, secret in (("one", b"1" * 32), ("again", b"1" * 32), ("other", b"2" * 32)):
        with recording(tmp_path / name, secret=secret, state_dir=tmp_path / "state") as running:
            running.ask([1, 2], "ada", "s")
    one, again, other = ({**lines(tmp_path / name)[0], "timestamp": 0} for name in ("one", "again", "other"))
    assert one == again
    assert not set(one["hash_ids"]) & set(other["hash_ids"])
    assert one["tenant"] != other["tenant"]
    assert one["session_id"] != other["session_id"]


def test_tenants_of_one_scope_share_blocks_in_the_trace_too(tmp_path: Path) -> None:
    with recording(tmp_path, scope="team") as running:
        running.ask([1, 2], "ada")
        running.ask([1, 2], "bob")
    ada, bob = lines(tmp_path)
    assert ada["hash_ids"] == bob["hash_ids"]
    assert ada["tenant"] != bob["tenant"]


def test_files_stay_within_their_bound_and_the_oldest_go_first(tmp_path: Path) -> None:
    with recording(tmp_path, most_bytes=8 * 2000) as running:
        for n in range(60):
            running.ask(range(n * 100, n * 100 + 40))
            if n % 3 == 0:
                running.recorder.since(None)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 8 * 1000 < sum(sizes) <= 8 * 2000
    assert len(sizes) > 3
    with recording(tmp_path / "all") as running:
        for n in range(60):
            running.ask(range(n * 100, n * 100 + 40))
    assert len(lines(tmp_path / "all")) == 60
    assert max(row["timestamp"] for row in lines(tmp_path / "all")) >= lines_of_newest(tmp_path)[-1]["timestamp"]


def lines_of_newest(directory: Path) -> list[dict[str, Any]]:
    newest = max(path for path in directory.iterdir() if path.is_file())
    return [json.loads(line) for line in newest.read_text().splitlines()]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as raised:
        TraceFiles(tmp_path / "file" / "trace", 1 << 20)
    assert raised.value.remedy


def test_a_full_disk_costs_requests_in_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True
    write: Callable[[TraceFiles, bytes], None] = TraceFiles.write

    def failing(self: TraceFiles, data: bytes) -> None:
        if full:
            write(self, data[:20])
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(TraceFiles, "write", failing)
    with recording(tmp_path / "trace") as running:
        for _ in range(2):
            running.ask([1])
            running.recorder.since(None)
        full = False
        running.ask([2])
    made = export([tmp_path / "trace"], tmp_path / "out")
    assert (made.requests, made.cut_lines) == (1, 2)
    assert len([record for record in caplog.records if "trace" in record.message]) == 1


def test_who_follows_gets_everything_once_and_in_order() -> None:
    with recording() as running:
        running.ask([7])  # nobody wants to know yet
        page = running.recorder.since(None)
        assert (page.rows, page.missed) == ([], 0)
        for n in range(5):
            running.ask([n, n + 1])
        first = running.recorder.since(page.last)
        running.ask([100])
        second = running.recorder.since(first.last)
        assert [len(first.rows), len(second.rows)] == [5, 1]
        assert (first.missed, second.missed) == (0, 0)
        again = running.recorder.since(page.last)
        assert again.rows == [*first.rows, *second.rows]
        assert running.recorder.since(second.last).rows == []


def test_a_tenant_is_told_its_own() -> None:
    with recording() as running:
        start = running.recorder.since(None).last
        running.ask([1], "ada")
        running.ask([2, 3], "bob")
        everybody = running.recorder.since(start)
        bobs = running.recorder.since(start, running.cache.engine.tenant("bob"))
        assert [len(row.blocks) for row in everybody.rows] == [1, 2]
        assert bobs.rows == everybody.rows[1:]
        assert (bobs.last, bobs.missed) == (everybody.last, 0)


def test_what_there_was_no_room_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_ROWS", 3)
    with recording() as running:
        start = running.recorder.since(None).last
        for n in range(8):
            running.ask([n])
        page = running.recorder.since(start)
        assert (len(page.rows), page.missed) == (3, 5)


def test_a_page_is_bounded_and_nothing_is_lost_between_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE_BLOCKS", 5)
    with recording() as running:
        at, found = running.recorder.since(None).last, 0
        for n in range(9):
            running.ask(range(n, n + 3))
        while rows := (page := running.recorder.since(at)).rows:
            assert len(rows) <= 2
            assert page.missed == 0
            at, found = page.last, found + len(rows)
        assert found == 9


def test_who_comes_back_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as running:
        start = running.recorder.since(None).last
        running.ask([1])
        before = running.recorder.since(start)
        assert len(before.rows) == 1
        running.recorder._wanted_until = 0.0  # a minute later
        running.ask([2])
        late = running.recorder.since(before.last)
        assert (late.rows, late.missed) == ([], None)
        running.ask([3])
        after = running.recorder.since(late.last)
        assert (len(after.rows), after.missed) == (1, 0)
