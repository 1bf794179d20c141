"""Pages on a device: any layout that engines on GPUs have, and the order in which streams may touch them.

On the CPU the same class runs with torch's own stand-ins for streams; on a GPU with real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.test_paged import DTYPES
from tierkv.engines.paged import payload_memory, payload_order
from tierkv.engines.paged_device import DevicePages
from tierkv.errors import SpecMismatch
from tierkv.spec import KVGroup, KVSpec, Order

CPU = torch.device("cpu")
PAGES = 6


def spec_of(dtype: str, kind: Any, heads: int, tokens: int, dim: int, order: Order = "NHD", layers: int = 2) -> KVSpec:
    return KVSpec("m", "w", dtype, tokens, (KVGroup(tuple(range(layers)), kind, heads, dim),), order=order)


def caches_of(
    layout: str,
    dtype: str,
    heads: int,
    tokens: int,
    dim: int,
    *,
    parts: int = 1,
    layers: int = 2,
    device: torch.device = CPU,
) -> tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
    """Return an engine's tensors full of any bits, and how they are now, ``[planes, pages, tokens, heads, dim]``."""
    pages, each = PAGES * parts, tokens // parts
    physical, to_engine, to_plain = {
        "2PNHD": ((2, pages, each, heads, dim), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
        "2PHND": ((2, pages, heads, each, dim), (0, 1, 3, 2, 4), (0, 1, 3, 2, 4)),
        "P2NHD": ((pages, 2, each, heads, dim), (0, 1, 2, 3, 4), (1, 0, 2, 3, 4)),
        "P2HND": ((pages, 2, heads, each, dim), (0, 1, 3, 2, 4), (1, 0, 3, 2, 4)),
        "PHN2D": ((pages, heads, each, 2, dim), (0, 1, 2, 3, 4), (3, 0, 2, 1, 4)),
        "PNH2D": ((pages, each, heads, 2, dim), (0, 2, 1, 3, 4), (3, 0, 1, 2, 4)),
        "PND": ((pages, each, dim), (0, 1, 2), (0, 1, 2)),
        "P1ND": ((pages, 1, each, dim), (0, 1, 2, 3), (0, 1, 2, 3)),
    }[layout]
    size = DTYPES[dtype].itemsize
    engine: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    for _ in range(layers):
        raw = torch.randint(0, 256, (*physical[:-1], physical[-1] * size), dtype=torch.uint8).to(device)
        cache = raw.view(DTYPES[dtype]).permute(*to_engine)
        engine.append(cache.flatten(3) if layout in ("PHN2D", "PNH2D") else cache)
        if physical[-2:] == (each, dim) and len(physical) < 5:
            plain.append(raw.view(1, pages, each, 1, dim * size))
        else:
            plain.append(raw.permute(*to_plain))
    # Pages as the engine numbers them: its parts follow each other.
    return engine, lambda: [view.cpu().reshape(view.shape[0], PAGES, -1, *view.shape[3:]).clone() for view in plain]


LAYOUTS = ["2PNHD", "2PHND", "P2NHD", "P2HND", "PHN2D", "PNH2D", "PND", "P1ND"]


@st.composite
def problems(draw: st.DrawFn) -> tuple[KVSpec, str, int, int]:
    layout = draw(st.sampled_from(LAYOUTS))
    latent = layout in ("PND", "P1ND")
    heads = 1 if latent else draw(st.integers(1, 3))
    parts, per_block = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    tokens = parts * draw(st.integers(1, 3))
    spec = spec_of(
        draw(st.sampled_from(sorted(DTYPES))),
        "mla" if latent else "full",
        heads,
        tokens * per_block,
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from(["NHD", "HND"])),
    )
    return spec, layout, tokens, parts


def payload(spec: KVSpec, plain: Sequence[torch.Tensor], pages: Sequence[int]) -> bytes:
    """The payload of a block by its definition."""
    layers = torch.stack([torch.cat([view[:, page] for page in pages], 1) for view in plain])
    return (layers if spec.order == "NHD" else layers.transpose(2, 3)).contiguous().numpy().tobytes()


@given(problems(), st.data())
def test_blocks_leave_their_pages_and_return_to_others(
    problem: tuple[KVSpec, str, int, int], data: st.DataObject
) -> None:
    spec, layout, tokens, parts = problem
    heads, dim = spec.groups[0].kv_heads, spec.groups[0].head_dim
    caches, look = caches_of(layout, spec.dtype, heads, tokens, dim, parts=parts)
    plain = look()
    group = DevicePages(caches, spec, 0, tokens)
    count = spec.block_tokens // tokens
    blocks = data.draw(st.lists(st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count), max_size=3))
    buffers = payload_memory(spec.layout().nbytes, len(blocks), CPU)
    group.start_save(list(zip(blocks, buffers, strict=True))).wait()
    assert [bytes(buffer) for buffer in buffers] == [payload(spec, plain, block) for block in blocks]

    source = data.draw(st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count))
    target = data.draw(st.permutations(range(PAGES)))[:count]
    table = [page if data.draw(st.booleans()) else -1 for page in target]
    wanted = look()
    for view, old in zip(wanted, plain, strict=True):
        for page, origin in zip(table, source, strict=True):
            if page >= 0:
                view[:, page] = old[:, origin]
    group.load(memoryview(payload(spec, plain, source)), table)
    for view, expected in zip(look(), wanted, strict=True):
        assert torch.equal(view, expected)


def test_blocks_larger_than_the_buffers_cross_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("bfloat16", "full", 2, 8, 16)
    monkeypatch.setattr("tierkv.engines.paged_device._BUFFER_BYTES", 1000)
    caches, look = caches_of("2PNHD", "bfloat16", 2, 4, 16)
    block = payload(spec, look(), [1, 2])
    DevicePages(caches, spec, 0, 4).load(memoryview(block), [4, 5])
    assert payload(spec, look(), [4, 5]) == block


@pytest.mark.parametrize(
    ("shape", "kind", "why"),
    [
        ((2, 2, 4, 2, 8), "full", "read in two ways"),
        ((2, 6, 2, 4, 8), "full", "are not those"),
        ((6, 4, 2, 16), "full", "are not those"),
        ((6, 2, 4, 8), "full", "are not those"),
        ((6, 3, 4, 16), "full", "are not those"),
        ((3, 6, 4, 2, 8), "full", "are not those"),
        ((6, 4, 8), "full", "are not those"),
        ((6, 4, 16), "mla", "are not those"),
        ((6, 2, 4, 8), "mla", "are not those"),
        ((6, 2, 3, 16), "full", "no pages of 4"),
        ((6, 2, 8, 16), "full", "no pages of 4"),
        ((5, 2, 2, 16), "full", "no pages of 4"),
    ],
)
def test_pages_that_are_not_known_or_may_be_two_things_are_refused(shape: tuple[int, ...], kind: str, why: str) -> None:
    spec = spec_of("float32", kind, 1 if kind == "mla" else 2, 8, 8)
    with pytest.raises(SpecMismatch, match=why):
        DevicePages([torch.zeros(*shape)] * 2, spec, 0, 4)


def test_layers_that_do_not_fit_are_refused() -> None:
    spec = spec_of("float32", "full", 2, 8, 8)
    good = [torch.zeros(6, 2, 4, 16) for _ in range(2)]
    DevicePages(good, spec, 0, 4)
    for caches, why in (
        (good[:1], "1 caches"),
        ([good[0], good[0]], "overlap"),
        ([good[0], torch.zeros(7, 2, 4, 16)], "differs"),
        ([layer.to(torch.bfloat16) for layer in good], "bfloat16"),
    ):
        with pytest.raises(SpecMismatch, match=why):
            DevicePages(caches, spec, 0, 4)


def test_gpus_keep_payloads_in_the_order_of_their_pages() -> None:
    assert payload_order("cuda") == "NHD"


class Streams:
    """Stands in for `torch.cuda`: notes what was queued, and where."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "engine"
        self.made = 0

    def Stream(self) -> Streams.Named:  # noqa: N802
        self.made += 1
        return Streams.Named(self, ("outward", "inward")[self.made - 1])

    def Event(self) -> Streams.Mark:  # noqa: N802
        return Streams.Mark(self)

    def current_stream(self) -> Streams.Named:
        return Streams.Named(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream: Streams.Named) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    class Named:
        def __init__(self, streams: Streams, name: str) -> None:
            self.streams, self.name = streams, name

        def wait_stream(self, other: Streams.Named) -> None:
            self.streams.log.append(f"{self.name} waits for {other.name}")

    class Mark:
        def __init__(self, streams: Streams) -> None:
            self.streams, self.of = streams, ""

        def record(self, stream: Streams.Named) -> None:
            self.of = stream.name

        def synchronize(self) -> None:
            if self.of:
                self.streams.log.append(f"processor waits for {self.of}")


def test_copies_are_ordered_by_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr("torch.get_device_module", lambda device: streams)
    for name in ("gather_blocks", "scatter_blocks"):
        note = f"{name.partition('_')[0]} on "
        monkeypatch.setattr(
            f"tierkv.engines.paged_device.{name}",
            lambda *_, order, note=note: streams.log.append(note + streams.current),
        )
    spec = spec_of("bfloat16", "full", 2, 8, 16)
    caches, _ = caches_of("2PNHD", "bfloat16", 2, 4, 16)
    group = DevicePages(caches, spec, 0, 4)
    assert streams.log[-1] == "inward waits for engine"  # the first load comes after the kernels' first run
    streams.log.clear()
    (buffer,) = payload_memory(spec.layout().nbytes, 1, CPU)
    copy = group.start_save([([0, 1], buffer)])
    assert streams.log == ["gather on engine", "outward waits for engine"]
    copy.wait()
    assert streams.log.pop() == "processor waits for outward"
    streams.log.clear()
    group.follow_engine()
    group.load(buffer, [2, 3])
    assert streams.log == ["inward waits for engine", "scatter on inward", "processor waits for inward"]
