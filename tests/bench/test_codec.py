"""`tierkv bench codec`: what it says of codecs is true, and what it refuses it refuses with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tierkv.errors import InvalidRequest, StorageError, TierKVError
from tierkv.service.bench.codec import BLOCK_TOKENS, bench_codec, cut, load_kv
from tierkv.service.bench.payload import kv_like
from tierkv.service.cli import app

KEYS = {"name", "ratio", "encode_gbps", "decode_gbps", "decode2_gbps", "exact", "rel_rms_k", "rel_rms_v"}
EXACT = {"raw", "bx1", "zstd-1", "zstd-3", "zstd-9"}
LOSSY = {"int8", "eq2", "eq3", "eq4", "eq5"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes for KV of 150 tokens."""
    directory = tmp_path_factory.mktemp("codec")
    np.save(directory / "kv.npy", kv_like((4, 2, 150, 2, 64), 1)[0])
    done = CliRunner().invoke(
        app, ["bench", "codec", "--input", f"{directory}/kv.npy", "--json", f"{directory}/out.json"]
    )
    assert done.exit_code == 0, done.output
    assert "128 of 150 tokens" in done.output
    assert "SYNTHETIC" not in done.output
    written: dict[str, Any] = json.loads((directory / "out.json").read_text())
    return written


def test_every_codec_is_measured(figures: dict[str, Any]) -> None:
    assert figures["memcpy_gbps"] > 0
    assert figures["blocks"] == 2
    rows = figures["codecs"]
    assert {row["name"] for row in rows} == EXACT | LOSSY
    for row in rows:
        assert set(row) == KEYS
        assert min(row["encode_gbps"], row["decode_gbps"], row["decode2_gbps"]) > 0


def test_exact_codecs_are_exact_and_lossy_ones_lose_more_the_more_they_save(figures: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in figures["codecs"]}
    for name in EXACT:
        assert rows[name]["exact"]
        assert rows[name]["rel_rms_k"] == rows[name]["rel_rms_v"] == 0
    for name in LOSSY:
        assert not rows[name]["exact"]
        assert 0 < rows[name]["rel_rms_k"] < 1
        assert 0 < rows[name]["rel_rms_v"] < 1
    assert 0.98 < rows["raw"]["ratio"] < 1
    assert rows["zstd-1"]["ratio"] < rows["bx1"]["ratio"]
    for better, worse in (("bx1", "eq2"), ("eq2", "eq3"), ("eq3", "eq4"), ("eq4", "eq5")):
        assert 1 < rows[better]["ratio"] < rows[worse]["ratio"]
        assert rows[better]["rel_rms_v"] < rows[worse]["rel_rms_v"]


def test_synthetic_data_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.service.bench.codec.kv_like", lambda shape, n: kv_like((2, 2, BLOCK_TOKENS, 1, 64), n))
    output = StringIO()
    figures = bench_codec(None, Console(file=output))
    assert "SYNTHETIC" in output.getvalue()
    assert figures["input"] == "synthetic"


def test_blocks_are_cut_along_the_tokens() -> None:
    kv = np.arange(3 * 2 * 200 * 2 * 4, dtype=np.uint16).reshape(3, 2, 200, 2, 4)
    blocks, used = cut(kv)
    assert used == 192
    assert blocks.shape == (3, 3, 2, BLOCK_TOKENS, 2, 4)
    for number, block in enumerate(blocks):
        assert np.array_equal(block, kv[:, :, number * BLOCK_TOKENS :][:, :, :BLOCK_TOKENS])


def save(value: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, value)


def bits(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.uint16)


BAD: dict[str, tuple[Callable[[Path], Any], type[TierKVError], str]] = {
    "missing": (lambda path: None, StorageError, "cannot read"),
    "directory": (lambda path: path.mkdir(), StorageError, "cannot read"),
    "empty": (lambda path: path.write_bytes(b""), InvalidRequest, "not a .npy"),
    "text": (lambda path: path.write_text("tokens"), InvalidRequest, "not a .npy"),
    "cut short": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), InvalidRequest, "not a .npy"),
    "objects": (save(np.array([{}], dtype=object)), InvalidRequest, "not a .npy"),
    "archive": (lambda path: np.savez(path.open("wb"), kv=bits(1, 2, 64, 1, 4)), InvalidRequest, "several arrays"),
    "float": (save(np.zeros((1, 2, 64, 1, 4), np.float32)), InvalidRequest, "float32, not uint16"),
    "four axes": (save(bits(2, 64, 1, 4)), InvalidRequest, r"shape \[2, 64, 1, 4\]"),
    "no K and V": (save(bits(1, 3, 64, 1, 4)), InvalidRequest, "shape"),
    "no layers": (save(bits(0, 2, 64, 1, 4)), InvalidRequest, "shape"),
    "few tokens": (save(bits(1, 2, 63, 1, 4)), InvalidRequest, "63 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_remedy(case: str, tmp_path: Path) -> None:
    write, error, message = BAD[case]
    write(tmp_path / "kv.npy")
    with pytest.raises(error, match=message) as caught:
        load_kv(tmp_path / "kv.npy")
    assert caught.value.remedy
    assert "kv.npy" in caught.value.message
