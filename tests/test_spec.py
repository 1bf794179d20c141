"""Identity: every field of a spec counts, and the encoding it is hashed from never changes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import InvalidRequest
from tierkv.spec import DTYPE_BYTES, LOSSY_CODECS, BlockLayout, KVGroup, KVSpec
from tierkv.storage.codecs import CODECS

VECTORS = Path(__file__).parent / "vectors" / "spec.json"

GROUP = KVGroup((0, 1), "full", 2, 64)
SPEC = KVSpec("org/model", "rev", "bfloat16", 16, (GROUP,))
CHANGED: dict[str, Any] = {
    "model": "org-model",
    "weights": "rev2",
    "dtype": "float16",
    "block_tokens": 32,
    "groups": (KVGroup((0, 1), "full", 2, 32),),
    "tokenizer": "t",
    "attention": {"rope_theta": "1e6"},
    "order": "HND",
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
    "cp_rank": 1,
    "cp_size": 2,
    "adapter": "lora",
    "quantization": "int8",
    "extra": {"note": "1"},
    "lossy": "eq3",
    "exact_first_block": True,
}


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(VECTORS.read_text())["cases"]
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_fingerprint_vectors(case: dict[str, Any]) -> None:
    spec = KVSpec.from_dict(case["spec"])
    assert spec.namespace == case["namespace"]
    assert spec.fingerprint == bytes.fromhex(case["namespace"])
    layouts = [
        [layout.dtype, list(layout.shape), layout.token_axis, layout.nbytes]
        for layout in map(spec.layout, range(len(spec.groups)))
    ]
    assert layouts == case["layouts"]
    assert KVSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_every_field_changes_the_fingerprint() -> None:
    assert set(CHANGED) == {field.name for field in fields(KVSpec)}
    without = {"exact_first_block": replace(SPEC, lossy="eq3")}
    variants = [SPEC, *(replace(without.get(name, SPEC), **{name: value}) for name, value in CHANGED.items())]
    assert len({spec.fingerprint for spec in variants}) == len(variants)


def test_every_field_of_a_group_changes_the_fingerprint() -> None:
    groups = [
        GROUP,
        KVGroup((0, 2), "full", 2, 64),
        KVGroup((0, 1), "mla", 2, 64),
        KVGroup((0, 1), "full", 1, 64),
        KVGroup((0, 1), "full", 2, 128),
        KVGroup((0, 1), "sliding_window", 2, 64, 16),
        KVGroup((0, 1), "sliding_window", 2, 64, 32),
    ]
    specs = [replace(SPEC, groups=(group,)) for group in groups]
    specs.append(replace(SPEC, groups=(KVGroup((0,), "full", 2, 64), KVGroup((1,), "full", 2, 64))))
    assert len({spec.fingerprint for spec in specs}) == len(specs)


texts = st.text(max_size=8)
maps = st.dictionaries(texts, texts, max_size=3)


@given(maps, maps, texts, texts)
def test_the_order_of_a_map_does_not_matter_but_its_text_does(
    attention: dict[str, str], extra: dict[str, str], model: str, adapter: str
) -> None:
    spec = replace(SPEC, model=model, adapter=adapter, attention=attention, extra=extra)
    turned = replace(spec, attention=dict(reversed(attention.items())), extra=dict(reversed(extra.items())))
    assert spec.fingerprint == turned.fingerprint
    assert KVSpec.from_dict(json.loads(json.dumps(spec.to_dict()))).fingerprint == spec.fingerprint
    assert replace(spec, model=model + "x").fingerprint != spec.fingerprint
    if attention != extra:
        assert replace(spec, attention=extra, extra=attention).fingerprint != spec.fingerprint


def test_layouts() -> None:
    groups = (GROUP, KVGroup((2,), "mla", 1, 576), KVGroup((3,), "sliding_window", 4, 8, 100))
    nhd, hnd = (replace(SPEC, groups=groups, order=order) for order in ("NHD", "HND"))
    assert nhd.layout(0) == BlockLayout("bfloat16", (2, 2, 16, 2, 64), 2)
    assert hnd.layout(0) == BlockLayout("bfloat16", (2, 2, 2, 16, 64), 3)
    assert nhd.layout(1) == BlockLayout("bfloat16", (1, 1, 16, 1, 576), 2)
    assert hnd.layout(2).shape == (1, 2, 4, 16, 8)
    for dtype, size in DTYPE_BYTES.items():
        assert replace(SPEC, dtype=dtype).layout().nbytes == 2 * 2 * 16 * 2 * 64 * size
    assert BlockLayout.opaque(100).nbytes == 100


def test_which_codec_a_block_may_be_stored_with() -> None:
    assert set(LOSSY_CODECS) == {codec.name for codec in CODECS if codec.lossy}
    lossy = replace(SPEC, lossy="eq3")
    assert [SPEC.codec(0), SPEC.codec(1)] == ["", ""]
    assert [lossy.codec(0), lossy.codec(1)] == ["eq3", "eq3"]
    assert [replace(lossy, exact_first_block=True).codec(depth) for depth in range(3)] == ["", "eq3", "eq3"]
    for dtype in ("float32", "bfloat16", "float16"):
        assert replace(lossy, dtype=dtype).lossy == "eq3"


def data(**changes: Any) -> dict[Any, Any]:
    return {**SPEC.to_dict(), **changes}


def group(**changes: Any) -> dict[str, Any]:
    return data(groups=[{**SPEC.to_dict()["groups"][0], **changes}])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (data(colour="red"), "colour"),
        ({**data(), 1: 2}, "1"),
        ({"model": "m"}, "weights"),
        ({}, "model"),
        (data(model=1), "model"),
        (data(block_tokens="16"), "block_tokens"),
        (data(block_tokens=16.0), "block_tokens"),
        (data(block_tokens=True), "block_tokens"),
        (data(block_tokens=0), "block_tokens"),
        (data(dtype="int4"), "int4"),
        (data(order="NDH"), "NDH"),
        (data(attention={"rope": 1}), "attention"),
        (data(extra={1: "one"}), "extra"),
        (data(extra=["a"]), "extra"),
        (data(lossy="eq6"), "lossy.*eq6.*eq2"),
        (data(lossy="bx1"), "lossy.*bx1"),
        (data(lossy=None), "lossy"),
        (data(lossy="int8", dtype="float8_e4m3"), "float8_e4m3.*bfloat16"),
        (data(lossy="int8", dtype="uint8"), "uint8"),
        (data(exact_first_block=True), "exact_first_block.*set lossy"),
        (data(lossy="eq3", exact_first_block=1), "exact_first_block"),
        (data(groups=[]), "at least one KV group"),
        (data(groups="full"), "groups"),
        (data(groups=[1]), "groups"),
        (data(groups=[{}]), "layers"),
        (group(colour="red"), "colour"),
        (group(kind="linear"), "linear"),
        (group(layers=[]), "layers"),
        (group(layers=[1, 0]), "layers"),
        (group(layers=[0, 0]), "layers"),
        (group(layers=[-1]), "layers"),
        (group(layers="01"), "layers"),
        (group(layers=[0.5]), "groups"),
        (group(kv_heads=0), "kv_heads"),
        (group(kv_heads=2.0), "groups"),
        (group(head_dim="64"), "groups"),
        (group(head_dim=True), "groups"),
        (group(window=16), "window"),
        (group(kind="sliding_window"), "window"),
        (group(kind="sliding_window", window=1.5), "groups"),
    ],
)
def test_what_is_no_spec_is_refused_by_name(bad: dict[Any, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        KVSpec.from_dict(bad)
