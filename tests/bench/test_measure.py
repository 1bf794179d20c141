"""What the benchmarks stand on: residency and eviction are real, payloads are what they say, errors name a remedy."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import StorageError
from tierkv.service.bench.evicted import measure_evicted, resident_share
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.service.bench.results import write_json
from tierkv.storage.tier import checksum

MIB = 1 << 20


def test_residency_tells_pages_that_were_read_from_a_hole_nobody_touched(tmp_path: Path) -> None:
    written, untouched = tmp_path / "written", tmp_path / "untouched"
    written.write_bytes(bytes(MIB))
    untouched.touch()
    os.truncate(untouched, 3 * MIB)
    assert resident_share([written]) == 1
    assert resident_share([untouched]) == 0
    assert resident_share([written, untouched]) == pytest.approx(0.25)
    assert resident_share([]) == 0


def test_a_file_system_that_cannot_evict_is_refused() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        pytest.raises(StorageError, match="stays in memory") as caught,
    ):
        measure_evicted(Path(memory), 256 << 10, 4 * MIB, 1)
    assert "--directory" in caught.value.remedy


def test_blocks_carry_the_checksums_of_their_bytes() -> None:
    blocks = Blocks.make(64 << 10, 3)
    assert blocks.data.shape == (3, 64 << 10)
    assert blocks.layout.nbytes == 64 << 10
    assert [meta.checksum for meta in blocks.metas] == [checksum(row.data) for row in blocks.data]
    keys = [fresh_key(), fresh_key()]
    assert len(set(keys)) == 2
    items = blocks.items(keys, start=1)
    assert [key for key, _, _ in items] == keys
    assert [bytes(payload) for _, payload, _ in items] == [blocks.data[1].tobytes(), blocks.data[2].tobytes()]


def test_figures_that_cannot_be_written_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="writable directory"):
        write_json({}, tmp_path / "missing" / "out.json")
    with pytest.raises(ValueError, match="JSON"):
        write_json({"speed": float(np.inf)}, tmp_path / "out.json")
