"""The shared segment: one owner, no leftovers, clients that know whom they talk to."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from tierkv.errors import ForeignStore, InvalidRequest, StorageError, StorageFull, StoreInUse, Unavailable
from tierkv.storage.shm import MappedSegment, SharedSegment, _touch

SIZE = 1 << 20
OWNER = """
import sys
from tierkv.storage.shm import SharedSegment
segment = SharedSegment(sys.argv[1], int(sys.argv[2]))
segment.data[:4] = b"mine"
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment"


def start_owner(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path), str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def leave_behind(path: Path) -> None:
    owner = start_owner(path)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert path.exists()


def test_file_is_private_reserved_and_zero(path: Path) -> None:
    segment = SharedSegment(path, SIZE)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= SIZE
    assert segment.data.nbytes == SIZE
    assert bytes(segment.data) == bytes(SIZE)
    segment.close()


def test_a_client_sees_the_owners_bytes_and_the_owner_the_clients(path: Path) -> None:
    segment = SharedSegment(path, SIZE)
    with MappedSegment(path, generation=segment.generation) as client:
        segment.data[:5] = b"hello"
        client.data[-3:] = b"you"
        assert (bytes(client.data[:5]), bytes(segment.data[-3:])) == (b"hello", b"you")
        assert (client.data_bytes, client.data_offset) == (SIZE, segment.data_offset)
    segment.close()


def test_close_removes_the_file_and_frees_the_name(path: Path) -> None:
    first = SharedSegment(path, SIZE)
    first.close()
    first.close()
    assert not path.exists()
    with pytest.raises(Unavailable):
        _ = first.data
    second = SharedSegment(path, SIZE)
    assert second.generation != first.generation
    second.close()


def test_views_outlive_close(path: Path) -> None:
    segment = SharedSegment(path, SIZE)
    view = segment.data[100:200]
    array = np.frombuffer(segment.data, np.uint8)
    view[:] = b"v" * 100
    segment.close()
    assert bytes(view) == b"v" * 100
    assert array[100] == ord("v")
    SharedSegment(path, SIZE).close()


def test_a_second_owner_is_told_who_holds_the_file(path: Path) -> None:
    owner = start_owner(path)
    with pytest.raises(StoreInUse, match=str(owner.pid)) as raised:
        SharedSegment(path, SIZE)
    assert str(path) in str(raised.value)
    with MappedSegment(path) as client:
        assert bytes(client.data[:4]) == b"mine"
    owner.communicate("\n")


def test_an_owner_that_forgets_to_close_leaves_nothing(path: Path) -> None:
    owner = start_owner(path)
    owner.communicate("\n")
    assert owner.returncode == 0
    assert not path.exists()


def test_what_a_killed_owner_left_is_replaced_not_overwritten(path: Path) -> None:
    leave_behind(path)
    with MappedSegment(path) as orphan:
        segment = SharedSegment(path, 2 * SIZE)
        assert bytes(segment.data[:4]) == bytes(4)
        assert bytes(orphan.data[:4]) == b"mine"
        with pytest.raises(Unavailable):
            MappedSegment(path, generation=orphan.generation)
        segment.close()


def test_of_many_that_want_a_leftover_exactly_one_gets_it(path: Path) -> None:
    leave_behind(path)
    leftover = path.read_bytes()[:4096]
    start = Barrier(6)

    def claim(_: int) -> SharedSegment | None:
        start.wait()
        try:
            return SharedSegment(path, SIZE)
        except StoreInUse:
            return None

    with ThreadPoolExecutor(6) as pool:
        for _ in range(40):
            path.write_bytes(leftover)
            segments = [segment for segment in pool.map(claim, range(6)) if segment is not None]
            assert len(segments) == 1
            MappedSegment(path, generation=segments[0].generation).close()
            segments[0].close()


def test_a_forked_child_does_not_take_the_file_away(path: Path) -> None:
    segment = SharedSegment(path, SIZE)
    child = os.fork()
    if child == 0:
        segment.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    with pytest.raises(StoreInUse):
        SharedSegment(path, SIZE)
    segment.close()


def test_no_room_is_an_error_at_creation_and_leaves_nothing(path: Path) -> None:
    with pytest.raises(StorageFull, match="MiB free") as raised:
        SharedSegment(path, 1 << 50)
    assert "capacity" in raised.value.remedy
    assert not path.exists()


def test_other_files_are_left_alone(path: Path) -> None:
    path.write_bytes(b"somebody's notes")
    with pytest.raises(ForeignStore):
        SharedSegment(path, SIZE)
    assert path.read_bytes() == b"somebody's notes"


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignStore):
        SharedSegment(path, SIZE)
    assert not (tmp_path / "elsewhere").exists()


def test_places_that_are_not_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignStore):
        SharedSegment(tmp_path, SIZE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForeignStore):
        SharedSegment(tmp_path / "pipe", SIZE)
    with pytest.raises(StorageError, match="nowhere"):
        SharedSegment(tmp_path / "nowhere" / "segment", SIZE)
    with pytest.raises(InvalidRequest):
        SharedSegment(tmp_path / "empty", 0)


def patched(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def test_a_client_refuses_what_it_does_not_understand(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="daemon running"):
        MappedSegment(path)
    (tmp_path / "notes").write_bytes(bytes(8192))
    with pytest.raises(InvalidRequest, match="not a tierkv shared segment"):
        MappedSegment(tmp_path / "notes")

    segment = SharedSegment(path, SIZE)
    with pytest.raises(Unavailable, match="another run"):
        MappedSegment(path, generation=segment.generation ^ 1)
    patched(path, 8, struct.pack("<I", 99))
    with pytest.raises(InvalidRequest, match="version 99"):
        MappedSegment(path)
    patched(path, 8, struct.pack("<I", 1))
    patched(path, 24, bytes(8))
    with pytest.raises(Unavailable, match="being created"):
        MappedSegment(path)
    patched(path, 24, bytes([1] * 8))
    os.truncate(path, SIZE)
    with pytest.raises(InvalidRequest, match="shorter"):
        MappedSegment(path)
    segment.close()


def test_a_client_that_closed_says_so(path: Path) -> None:
    segment = SharedSegment(path, SIZE)
    client = MappedSegment(path)
    view = client.data[:4]
    client.close()
    client.close()
    with pytest.raises(Unavailable):
        _ = client.data
    segment.data[:4] = b"kept"
    assert bytes(view) == b"kept"
    segment.close()


def test_faulting_pages_in_by_hand_changes_no_byte(path: Path) -> None:
    import mmap

    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as mapping:
        mapping[:] = bytes(range(256)) * (8 * mmap.PAGESIZE // 256)
        before = bytes(mapping)
        _touch(mapping, mmap.PAGESIZE, 5 * mmap.PAGESIZE + 100)
        assert bytes(mapping) == before
