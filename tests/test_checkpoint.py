"""What a checkpoint says about its KV, and that no change of the weights goes unnoticed where it is sampled."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.checkpoint import SAMPLE_BYTES, SAMPLED_PAGES, read_checkpoint, sample_offsets
from tierkv.errors import DependencyMissing, InvalidRequest
from tierkv.spec import KVGroup, KVSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "rope_theta": 10000.0,
}
SIZE = 3_000_000


def write(root: Path, config: dict[str, Any], size: int = SIZE) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    body = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    (root / "tokenizer.json").write_text('{"model": {}}')
    return root


def namespace(path: Path) -> str:
    return KVSpec.from_pretrained(path).namespace


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "original", LLAMA)


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@given(st.integers(0, 10**12))
def test_sampled_pages_cover_both_ends_and_spread_evenly(size: int) -> None:
    offsets = sample_offsets(size)
    assert offsets == sorted(set(offsets))
    assert offsets[0] == 0
    assert offsets[-1] == max(size - SAMPLE_BYTES, 0)
    assert len(offsets) <= SAMPLED_PAGES
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    assert all(gap <= size // (SAMPLED_PAGES - 1) + SAMPLE_BYTES for gap in gaps)


@given(page=st.integers(0, SAMPLED_PAGES - 1), within=st.integers(0, SAMPLE_BYTES - 1), bit=st.integers(0, 7))
def test_one_bit_in_a_sampled_page_changes_the_namespace(pristine: Path, page: int, within: int, bit: int) -> None:
    file = pristine / "model.safetensors"
    before = namespace(pristine)
    # The length and text of the header are tested apart: damage there is refused or noticed wherever it is.
    position = max(sample_offsets(file.stat().st_size)[page] + within, 200)

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(position)
            byte = stream.read(1)[0]
            stream.seek(position)
            stream.write(bytes([byte ^ (1 << bit)]))

    flip()
    try:
        assert namespace(pristine) != before
    finally:
        flip()
    assert namespace(pristine) == before


def grow(root: Path) -> None:
    with (root / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")


def edit(field: str, value: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        config = json.loads((root / "config.json").read_text())
        (root / "config.json").write_text(json.dumps({**config, field: value}))

    return change


def rewrite_header(root: Path) -> None:
    file = root / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"', 1))


def add_shard(root: Path) -> None:
    shutil.copy(root / "model.safetensors", root / "more.safetensors")


def retrain_tokenizer(root: Path) -> None:
    (root / "tokenizer.json").write_text('{"model": {"a": 1}}')


@pytest.mark.parametrize(
    "change",
    [
        grow,
        rewrite_header,
        add_shard,
        retrain_tokenizer,
        edit("rope_theta", 500000.0),
        edit("rms_norm_eps", 1e-6),
        edit("num_hidden_layers", 3),
        edit("architectures", ["MistralForCausalLM"]),
    ],
)
def test_a_changed_checkpoint_is_another_namespace(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = namespace(checkpoint)
    change(checkpoint)
    assert namespace(checkpoint) != before


def test_name_place_and_age_do_not_matter(pristine: Path, checkpoint: Path, tmp_path: Path) -> None:
    before = namespace(pristine)
    assert namespace(checkpoint) == before
    moved = checkpoint.rename(tmp_path / "another-name")
    os.utime(moved / "model.safetensors", (1, 1))
    edit("_name_or_path", "somebody/else")(moved)
    edit("transformers_version", "9.9")(moved)
    assert namespace(moved) == before


def test_pytorch_files_count_where_there_are_no_safetensors(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    before = namespace(checkpoint)
    with (checkpoint / "pytorch_model.bin").open("r+b") as stream:
        stream.write(b"changed")
    assert namespace(checkpoint) != before


def full(*layers: int, heads: int = 2, dim: int = 32) -> KVGroup:
    return KVGroup(layers, "full", heads, dim)


def sliding(*layers: int, window: int, heads: int = 2, dim: int = 32) -> KVGroup:
    return KVGroup(layers, "sliding_window", heads, dim, window)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, [full(0, 1, 2, 3)]),
        ({"head_dim": 64}, [full(0, 1, 2, 3, dim=64)]),
        ({"num_key_value_heads": None}, [full(0, 1, 2, 3, heads=8)]),
        ({"text_config": {"num_hidden_layers": 2}}, [full(0, 1)]),
        ({"num_kv_shared_layers": 1}, [full(0, 1, 2)]),
        ({"model_type": "mistral", "sliding_window": 128}, [sliding(0, 1, 2, 3, window=128)]),
        ({"model_type": "mistral", "sliding_window": None}, [full(0, 1, 2, 3)]),
        ({"model_type": "qwen2", "sliding_window": 128}, [full(0, 1, 2, 3)]),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, [full(0, 1, 2, 3)]),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3},
            [full(0, 1, 2), sliding(3, window=128)],
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, [full(1, 3), sliding(0, 2, window=64)]),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, [full(2), sliding(0, 1, 3, window=64)]),
        (
            {"sliding_window": 64, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
            [full(0), sliding(1, 2, 3, window=64)],
        ),
        ({"layer_types": ["chunked_attention", "full_attention"] * 2}, [full(0, 1, 2, 3)]),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [KVGroup((0, 1, 2, 3), "mla", 1, 576)]),
    ],
)
def test_groups_follow_the_configuration(tmp_path: Path, changes: dict[str, Any], groups: list[KVGroup]) -> None:
    assert list(read_checkpoint(write(tmp_path, LLAMA | changes, size=100))["groups"]) == groups


def test_attention_names_what_changes_kv(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = LLAMA | {"rope_scaling": scaling, "attn_logit_softcapping": 50.0}
    attention = read_checkpoint(write(tmp_path, config, size=100))["attention"]
    assert attention["rope_theta"] == "10000.0"
    assert json.loads(attention["rope_scaling"]) == scaling
    assert attention["attn_logit_softcapping"] == "50.0"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "eight"}, "num_attention_heads"),
        ({"head_dim": [64, 128]}, "head_dim"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        read_checkpoint(write(tmp_path, LLAMA | changes, size=100))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def break_config(root: Path) -> None:
    (root / "config.json").write_text("{")


def drop_weights(root: Path) -> None:
    (root / "model.safetensors").unlink()


def truncate_weights(root: Path) -> None:
    os.truncate(root / "model.safetensors", 20)


def name_missing_shard(root: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-00002.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def remove(root: Path) -> None:
    shutil.rmtree(root)


def only_config_is_gone(root: Path) -> None:
    (root / "config.json").unlink()


def two_ggufs(root: Path) -> None:
    only_config_is_gone(root)
    for name in ("a.gguf", "b.gguf"):
        (root / name).write_bytes(b"GGUF")


@pytest.mark.parametrize(
    "damage",
    [break_config, drop_weights, truncate_weights, name_missing_shard, remove, only_config_is_gone, two_ggufs],
)
def test_an_incomplete_checkpoint_is_refused_by_name(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint)
    with pytest.raises(InvalidRequest, match="copy") as caught:
        read_checkpoint(checkpoint)
    assert caught.value.remedy


def write_gguf(file: Path, arch: str = "llama", seed: int = 0, **changes: Any) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(changes.get("layers", 6))
    writer.add_head_count(4)
    writer.add_head_count_kv(changes.get("kv_heads", 2))
    writer.add_embedding_length(128)
    writer.add_rope_freq_base(changes.get("rope", 10000.0))
    if "window" in changes:
        writer.add_sliding_window(changes["window"])
    if "latent" in changes:
        writer.add_kv_lora_rank(changes["latent"])
        writer.add_rope_dimension_count(64)
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tensor("w", np.random.default_rng(seed).random((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_a_checkpoint_under_any_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    found = read_checkpoint(file)
    assert found["model"] == "llama"
    assert found["groups"] == (full(0, 1, 2, 3, 4, 5),)
    assert found["attention"]["rope_theta"] == "10000.0"
    before = namespace(file)
    assert namespace(tmp_path) == before
    assert namespace(file.rename(tmp_path / "renamed.gguf")) == before


@pytest.mark.parametrize("changes", [{"seed": 1}, {"rope": 500000.0}, {"tokenizer": "llama"}, {"layers": 5}])
def test_a_changed_gguf_file_is_another_namespace(tmp_path: Path, changes: dict[str, Any]) -> None:
    before = namespace(write_gguf(tmp_path / "before.gguf"))
    assert namespace(write_gguf(tmp_path / "after.gguf", **changes)) != before


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"kv_heads": [2] * 6}, [full(0, 1, 2, 3, 4, 5)]),
        ({"arch": "gemma3", "window": 512}, [full(5), sliding(0, 1, 2, 3, 4, window=512)]),
        ({"arch": "deepseek2", "latent": 512}, [KVGroup((0, 1, 2, 3, 4, 5), "mla", 1, 576)]),
    ],
)
def test_gguf_groups(tmp_path: Path, changes: dict[str, Any], groups: list[KVGroup]) -> None:
    assert list(read_checkpoint(write_gguf(tmp_path / "m.gguf", **changes))["groups"]) == groups


def test_a_gguf_file_with_uneven_layers_or_no_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="num_key_value_heads"):
        read_checkpoint(write_gguf(tmp_path / "uneven.gguf", kv_heads=[2, 4] * 3))
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "other.gguf").write_bytes(b"something else" * 100)
    for name in ("empty.gguf", "other.gguf"):
        with pytest.raises(InvalidRequest, match=name):
            read_checkpoint(tmp_path / name)


def test_gguf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DependencyMissing) as caught:
        read_checkpoint(tmp_path)
    assert "pip install" in caught.value.remedy
