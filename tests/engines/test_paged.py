"""Pages of any shape an engine may have, against the plainest code that could move them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.engines.paged import HostPages, host_memory, open_group, payload_order
from tierkv.errors import ConfigError, SpecMismatch
from tierkv.spec import KVGroup, KVSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}


def spec_of(dtype: str, layers: int, kind: Any, heads: int, tokens: int, dim: int) -> KVSpec:
    group = KVGroup(tuple(range(layers)), kind, heads, dim)
    return KVSpec("m", "w", dtype, tokens, (group,), order="HND")


@st.composite
def paged(draw: st.DrawFn) -> tuple[KVSpec, list[torch.Tensor], int]:
    """A spec, its layers' pages full of any bits, in memory of any order, and the tokens of a page."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    kind = draw(st.sampled_from(["full", "mla"]))
    layers, dim, parts = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 2]))
    heads = 1 if kind == "mla" else draw(st.integers(1, 3))
    page, per_block = parts * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    spec = spec_of(dtype, layers, kind, heads, page * per_block, dim)
    width = dim * (1 if kind == "mla" else 2)
    order = draw(st.permutations(range(3)))
    shape = (6 * parts, heads, page // parts, width)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size, back = DTYPES[dtype].itemsize, [order.index(axis) for axis in range(3)]
    raw = rng.integers(0, 256, (layers + 2, *(shape[axis] for axis in order), width * size), np.uint8)
    # Layers in one allocation, evenly or with gaps, in any order; or each in its own.
    places = draw(st.permutations(range(layers + 2)))[:layers]
    places = sorted(places) if draw(st.booleans()) else places
    whole = torch.from_numpy(raw)
    allocations = [whole[p] for p in places] if draw(st.booleans()) else [whole[p].clone() for p in places]
    caches = [layer.view(DTYPES[dtype]).permute(*back, 3) for layer in allocations]
    return spec, caches, page


def plain(spec: KVSpec, caches: list[torch.Tensor], pages: list[int], page_tokens: int) -> np.ndarray[Any, Any]:
    """The payload of a block, element by element."""
    layers, planes, heads, tokens, dim = spec.layout().shape
    payload = np.empty((layers, planes, heads, tokens, dim * DTYPES[spec.dtype].itemsize), np.uint8)
    for layer, cache in enumerate(caches):
        part = cache.shape[2]
        numbers = cache.contiguous().view(torch.uint8).numpy().reshape(*cache.shape[:3], planes, -1)
        for token in range(tokens):
            page, within = pages[token // page_tokens], token % page_tokens
            for plane in range(planes):
                payload[layer, plane, :, token] = numbers[
                    page * (page_tokens // part) + within // part, :, within % part, plane
                ]
    return payload


@settings(max_examples=60, deadline=None)
@given(paged(), st.data())
def test_a_block_is_its_pages_whatever_their_layout(
    found: tuple[KVSpec, list[torch.Tensor], int], data: st.DataObject
) -> None:
    spec, caches, page = found
    group = HostPages(caches, spec, 0, page)
    table = data.draw(
        st.lists(st.integers(0, 5), min_size=spec.block_tokens // page, max_size=spec.block_tokens // page)
    )
    out = host_memory(spec.layout().nbytes)
    group.start_save([(table, out)]).wait()
    assert bytes(out) == plain(spec, caches, table, page).tobytes()


@settings(max_examples=60, deadline=None)
@given(paged(), st.data())
def test_a_load_fills_the_pages_it_names_and_no_other(
    found: tuple[KVSpec, list[torch.Tensor], int], data: st.DataObject
) -> None:
    spec, caches, page = found
    count = spec.block_tokens // page
    source = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    target = data.draw(st.permutations(range(6)))[:count]
    skipped = [data.draw(st.booleans()) for _ in range(count)]
    payload = plain(spec, caches, source, page)
    before = [cache.clone() for cache in caches]
    group = open_group(caches, spec, 0, page)
    group.load(
        memoryview(payload.tobytes()), [-1 if skip else page_ for skip, page_ in zip(skipped, target, strict=True)]
    )
    parts = page // caches[0].shape[2]
    wanted = plain(spec, before, list(target), page)
    for slot, skip in enumerate(skipped):
        if not skip:
            wanted[:, :, :, slot * page : (slot + 1) * page] = payload[:, :, :, slot * page : (slot + 1) * page]
    assert plain(spec, caches, list(target), page).tobytes() == wanted.tobytes()
    untouched = [p * parts + part for p in range(6) if p not in target for part in range(parts)]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[untouched].view(torch.uint8), old[untouched].view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "page"),
    [((6, 2, 4, 8), 4), ((6, 3, 4, 16), 4), ((6, 2, 4, 16), 3), ((5, 2, 2, 16), 4), ((6, 2, 64), 4)],
)
def test_pages_of_another_shape_are_refused(shape: tuple[int, ...], page: int) -> None:
    spec = spec_of("float32", 1, "full", 2, 4 if page == 4 else 3, 8)
    HostPages([torch.zeros(6, 2, 4, 16)], spec_of("float32", 1, "full", 2, 8, 8), 0, 4)
    with pytest.raises(SpecMismatch):
        HostPages([torch.zeros(*shape)], spec, 0, page)


def test_layers_and_devices_that_do_not_fit_are_refused() -> None:
    spec = spec_of("float32", 2, "full", 2, 8, 8)
    with pytest.raises(SpecMismatch, match="layers"):
        HostPages([torch.zeros(6, 2, 4, 16)], spec, 0, 4)
    assert payload_order("cpu") == "HND"
    with pytest.raises(ConfigError, match="meta"):
        open_group([torch.zeros(6, 2, 4, 16, device="meta")] * 2, spec, 0, 4)
