"""What the connector makes of vLLM's configuration, and what it refuses: on stand-ins with the fields it looks at."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tierkv.engines.vllm.identity import Named, page_geometry, read_spec
from tierkv.engines.vllm.options import parse_options
from tierkv.engines.vllm.versions import check_vllm
from tierkv.errors import ConfigError, DependencyMissing, InvalidRequest
from tierkv.spec import KVGroup, KVSpec

OPTIONS = parse_options({"url": "unix:///run/tierkv.sock"})


@dataclass
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 16
    dtype: str = "torch.float32"
    kv_quant_mode: int = 0
    num_head_slots: int | None = None
    non_causal: bool = False


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 128
    extra_retained_tokens: int = 0


class MambaSpec(FullAttentionSpec):
    pass


def caches(*specs: Any, hashed: int | None = None, eagle: bool = False) -> SimpleNamespace:
    """Groups of two layers each: 0 and 1, 2 and 3 ..., named out of order."""
    groups = [
        SimpleNamespace(
            layer_names=[f"model.layers.{2 * n + 1}.self_attn.attn", f"model.layers.{2 * n}.self_attn.attn"],
            kv_cache_spec=spec,
            is_eagle_group=eagle,
        )
        for n, spec in enumerate(specs or (FullAttentionSpec(),))
    ]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hashed, num_blocks=100)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
    }
    header = json.dumps({"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
    return tmp_path


def vllm_config(model: Path | str = "", **changes: Any) -> SimpleNamespace:
    """A configuration; changes are ``section__field=value``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype="torch.float32",
            quantization=None,
            hf_overrides={},
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="uni"
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section) if field else config, field or section, value)
    return config


def spec_of(config: Any, kv: Any, **changes: Any) -> KVSpec:
    return read_spec(config, kv, OPTIONS, **{"device": "cpu", "tp_rank": 0, "pp_rank": 0, **changes})


def test_the_spec_says_what_the_engine_keeps(checkpoint: Path) -> None:
    spec = spec_of(vllm_config(checkpoint), caches(FullAttentionSpec(), SlidingWindowSpec()))
    assert spec.groups == (
        KVGroup((0, 1), "full", 2, 16),
        KVGroup((2, 3), "sliding_window", 2, 16, 128),
    )
    assert (spec.model, spec.dtype, spec.block_tokens, spec.order) == ("LlamaForCausalLM", "float32", 64, "HND")


def test_whatever_changes_kv_changes_the_namespace(checkpoint: Path) -> None:
    specs = [
        spec_of(vllm_config(checkpoint), caches()),
        spec_of(vllm_config(checkpoint, model_config__dtype="torch.bfloat16"), caches()),
        spec_of(vllm_config(checkpoint, model_config__quantization="fp8"), caches()),
        spec_of(vllm_config(checkpoint, model_config__hf_overrides={"rope_theta": 5}), caches()),
        spec_of(vllm_config(checkpoint, parallel_config__tensor_parallel_size=2), caches()),
        spec_of(vllm_config(checkpoint, parallel_config__tensor_parallel_size=2), caches(), tp_rank=1),
        spec_of(vllm_config(checkpoint, parallel_config__pipeline_parallel_size=2), caches(), pp_rank=1),
        spec_of(vllm_config(checkpoint), caches(FullAttentionSpec(dtype="torch.bfloat16"))),
        spec_of(
            vllm_config(checkpoint, cache_config__cache_dtype="fp8_e4m3"),
            caches(FullAttentionSpec(dtype="torch.float8_e4m3fn", kv_quant_mode=1)),
        ),
        spec_of(
            vllm_config(checkpoint, cache_config__cache_dtype="fp8_inc"),
            caches(FullAttentionSpec(dtype="torch.float8_e4m3fn", kv_quant_mode=1)),
        ),
    ]
    (checkpoint / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-1] + b"x")
    specs.append(spec_of(vllm_config(checkpoint), caches()))
    assert len({spec.namespace for spec in specs}) == len(specs)


def test_positions_that_depend_on_the_length_bring_it_into_the_namespace(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    longrope = {**config, "rope_scaling": {"rope_type": "longrope"}}

    def namespaces() -> set[str]:
        return {
            spec_of(vllm_config(checkpoint, model_config__max_model_len=n), caches()).namespace for n in (4096, 131072)
        }

    assert len(namespaces()) == 1
    (checkpoint / "config.json").write_text(json.dumps(longrope))
    assert len(namespaces()) == 2


def test_two_namespaces_share_no_block_of_the_same_tokens(checkpoint: Path) -> None:
    hashes = [bytes([n]) * 32 for n in range(3)]
    spec = spec_of(vllm_config(checkpoint), caches())
    chains = [
        Named.of(spec, ""),
        Named.of(spec, "reset"),
        Named.of(spec_of(vllm_config(checkpoint), caches(), tp_rank=1), ""),
    ]
    names = [h for named in chains for h in named.chain(hashes).hashes]
    assert len(set(names)) == 9
    assert not set(names) & set(hashes)
    assert Named.of(spec, "").chain(hashes) == Named.of(spec, "").chain(hashes)


@pytest.mark.parametrize(
    ("kv", "changes", "told"),
    [
        (caches(MambaSpec()), {}, "MambaSpec"),
        (caches(eagle=True), {}, "layers.0"),
        (caches(FullAttentionSpec(head_size_v=8)), {}, "FullAttentionSpec"),
        (caches(FullAttentionSpec(num_head_slots=4)), {}, "FullAttentionSpec"),
        (caches(FullAttentionSpec(non_causal=True)), {}, "FullAttentionSpec"),
        (caches(FullAttentionSpec(kv_quant_mode=3)), {}, "FullAttentionSpec"),
        (caches(SlidingWindowSpec(extra_retained_tokens=3)), {}, "SlidingWindowSpec"),
        (caches(FullAttentionSpec(), FullAttentionSpec(block_size=16)), {}, "16, 32"),
        (caches(FullAttentionSpec(), FullAttentionSpec(dtype="torch.float16")), {}, "float16"),
        (caches(), {"cache_config__prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo sha256"),
        (caches(), {"cache_config__calculate_kv_scales": True}, "scales"),
        (caches(), {"load_config__load_format": "dummy"}, "dummy"),
        (caches(), {"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        (caches(), {"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
        (caches(), {"model_config__hf_overrides": lambda config: config}, "function"),
    ],
)
def test_kv_that_has_no_sure_name_is_refused(checkpoint: Path, kv: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        spec_of(vllm_config(checkpoint, **changes), kv)


def test_drafts_from_the_prompt_keep_no_kv(checkpoint: Path) -> None:
    spec_of(vllm_config(checkpoint, speculative_config=SimpleNamespace(method="ngram")), caches())


def test_a_model_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nobody/nothing"):
        spec_of(vllm_config("nobody/nothing"), caches())


@pytest.mark.parametrize(
    ("page", "hashed", "asked", "block", "per_block", "hashes"),
    [
        (16, None, None, 64, 4, 4),
        (32, 32, None, 64, 2, 2),
        (128, None, None, 128, 1, 1),
        (48, 16, None, 96, 2, 6),
        (16, None, 128, 128, 8, 8),
    ],
)
def test_blocks_are_whole_pages(
    page: int, hashed: int | None, asked: int | None, block: int, per_block: int, hashes: int
) -> None:
    options = parse_options({"url": "unix:///s", **({"block_tokens": asked} if asked else {})})
    found = page_geometry(vllm_config(), caches(FullAttentionSpec(block_size=page), hashed=hashed), options)
    assert (found.block_tokens, found.pages_per_block, found.hashes_per_block) == (block, per_block, hashes)


def test_blocks_that_are_not_whole_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        page_geometry(vllm_config(), caches(), parse_options({"url": "unix:///s", "block_tokens": 48}))


@pytest.mark.parametrize(("workers", "backend"), [(2, "mp"), (1, "mp"), (2, "uni")])
def test_a_cache_in_this_process_needs_all_of_vllm_in_it(workers: int, backend: str) -> None:
    options = parse_options({"config": {}})
    apart = vllm_config(parallel_config__world_size=workers, parallel_config__distributed_executor_backend=backend)
    with pytest.raises(ConfigError, match="tierkv serve"):
        page_geometry(apart, caches(), options)
    assert page_geometry(vllm_config(), caches(), options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "url"),
        ({"url": "unix:///s", "config": {}}, "not both"),
        ({"url": "unix:///s", "blok_tokens": 64}, "did you mean 'block_tokens'"),
        ({"url": "unix:///s", "block_tokens": "64"}, "block_tokens"),
        ({"url": "unix:///s", "block_tokens": 0}, "block_tokens"),
        ({"url": "unix:///s", "wait_s": "soon"}, "wait_s"),
        ({"url": "unix:///s", "compute_s": -1}, "compute_s"),
        ({"url": "unix:///s", "staging_bytes": "much"}, "staging_bytes"),
        ({"url": 5}, "url"),
        ({"config": {}, "token": "t"}, "token"),
    ],
)
def test_settings_that_nobody_can_mean_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_options(options)


def test_a_token_is_not_shown() -> None:
    assert "hush" not in repr(parse_options({"url": "unix:///s", "token": "hush"}))


def test_without_vllm_the_connector_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vllm>=0\.32,<0\.34"):
        check_vllm()
    import tierkv.engines.vllm

    with pytest.raises(DependencyMissing):
        _ = tierkv.engines.vllm.TierKVConnector
    with pytest.raises(AttributeError):
        _ = tierkv.engines.vllm.SomethingElse


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0"])
def test_another_vllm_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    found = ModuleType("vllm")
    found.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", found)
    with pytest.raises(DependencyMissing, match=version):
        check_vllm()


@pytest.mark.parametrize("version", ["0.33.1.dev7+g1234", "dev"])
def test_a_right_number_with_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    found = ModuleType("vllm")
    found.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", found)
    with pytest.raises(DependencyMissing, match=r"get_num_new_matched_tokens.* is missing"):
        check_vllm()
