"""Byte planes on the device: the codec's own, whatever the layout, and from or to pages as well as payloads."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.paged import POISON, Problem, problems, random_bytes, raw
from tierkv.kernels.paged_caches import PagedCaches, PayloadOrder
from tierkv.kernels.pages import gather_blocks, scatter_blocks
from tierkv.kernels.plane_kernel import merge_into_pages, split_from_pages
from tierkv.kernels.plane_move import PlaneSizes, plan_merge, plan_split
from tierkv.kernels.planes import gather_planes, merge_planes, planes_nbytes, scatter_planes, split_planes
from tierkv.spec import BlockLayout
from tierkv.storage.codecs.bx1 import Bx1

CPU = torch.device("cpu")
NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}
DTYPES = list(NAMES)
# Several tiles of channels, in both orders, and tokens that are no power of two.
WIDE = Problem("2PNHD", "NHD", torch.bfloat16, 3, 3, 5, 64, 1, ((2, -1), (0, 1)))
WIDE_TURNED = Problem("P2NHD", "HND", torch.float32, 3, 24, 5, 80, 1, ((1, 2),), permuted=True)
LATENTS = Problem("PND", "NHD", torch.float16, 3, 16, 1, 576, 2, ((2, 0),))


def buffers(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor | list[Tensor]]:
    """Return poisoned room for the planes of a problem's blocks, and the buffers in it."""
    nbytes = planes_nbytes(problem.block_shape, problem.dtype, problem.order)
    padded = problem.padded(nbytes, device)
    return padded, problem.laid_out(padded[:, :nbytes])


def codec_planes(payload: Tensor, dtype: torch.dtype, order: PayloadOrder) -> bytearray:
    """Encode a block with the codec and return the planes that its sections expand to."""
    codec, layout = Bx1(), BlockLayout(NAMES[dtype], tuple(payload.shape), 2 if order == "NHD" else 3)
    sections = [memoryview(section.tobytes()) for section in codec.encode(raw(payload), layout)]
    planes = bytearray([POISON]) * codec.planes_nbytes(layout)
    codec.decode_planes_into(sections, memoryview(planes), layout)
    return planes


def without_padding(planes: bytes | bytearray, sizes: PlaneSizes) -> list[bytes]:
    assert len(planes) == sizes.nbytes
    return [bytes(planes[at : at + size]) for at, size in zip(sizes.offsets, sizes.sizes, strict=True)]


@st.composite
def payloads(draw: st.DrawFn) -> tuple[Tensor, torch.dtype, PayloadOrder]:
    dtype, order = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["NHD", "HND"]))
    planes = draw(st.integers(1, 2))
    rows = [draw(st.integers(1, 20)), draw(st.integers(1, 3))]
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), planes, *rows[:: 1 if order == "NHD" else -1])
    dim = draw(st.sampled_from([1, 3, 8, 16, 64]))
    count = torch.Size(shape).numel() * dim
    return random_bytes(count * dtype.itemsize, CPU).view(dtype).view(*shape, dim), dtype, order


@given(drawn=payloads())
@settings(max_examples=40)
def test_the_codecs_planes_merge_to_its_payload_and_split_from_it(
    drawn: tuple[Tensor, torch.dtype, PayloadOrder],
) -> None:
    payload, dtype, order = drawn
    sizes = PlaneSizes.of(tuple(payload.shape[1:]), dtype, order)
    expected = [codec_planes(block, dtype, order) for block in payload]
    merged, split = torch.empty_like(payload), torch.empty(len(payload), sizes.nbytes, dtype=torch.uint8)
    merge_planes([torch.frombuffer(planes, dtype=torch.uint8) for planes in expected], merged, order=order)
    assert raw(merged) == raw(payload)
    split_planes(payload, split, order=order)
    for found, planes in zip(split, expected, strict=True):
        assert without_padding(raw(found), sizes) == without_padding(planes, sizes)


@given(problem=problems(DTYPES))
@example(problem=WIDE)
@example(problem=WIDE_TURNED)
@example(problem=LATENTS)
@settings(max_examples=25)
def test_gathering_planes_is_gathering_and_splitting(problem: Problem) -> None:
    caches = problem.paged(problem.tensors(CPU))
    _, found = buffers(problem, CPU)
    gather_planes(caches, problem.ids, found, order=problem.order)
    _, gathered = problem.poisoned(CPU)
    gather_blocks(caches, problem.ids, gathered, order=problem.order)
    sizes = PlaneSizes.of(problem.block_shape, problem.dtype, problem.order)
    for planes, payload in zip(found, gathered, strict=True):
        assert without_padding(raw(planes), sizes) == without_padding(
            codec_planes(payload, problem.dtype, problem.order), sizes
        )


@given(problem=problems(DTYPES))
@example(problem=WIDE)
@example(problem=WIDE_TURNED)
@example(problem=LATENTS)
@settings(max_examples=25)
def test_scattering_planes_is_merging_and_scattering(problem: Problem) -> None:
    tensors = problem.tensors(CPU)
    expected = [tensor.clone() for tensor in tensors]
    blocks = list(problem.payloads(CPU))
    planes = [torch.frombuffer(codec_planes(b, problem.dtype, problem.order), dtype=torch.uint8) for b in blocks]
    scatter_planes(planes, problem.ids, problem.paged(tensors), order=problem.order)
    scatter_blocks(blocks, problem.ids, problem.paged(expected), order=problem.order)
    assert raw(tensors) == raw(expected)


@given(problem=problems(DTYPES))
@example(problem=WIDE)
@example(problem=WIDE_TURNED)
@example(problem=LATENTS)
@settings(max_examples=40)
def test_kernel_splits_what_the_reference_splits(device: torch.device, problem: Problem) -> None:
    tensors = problem.tensors(device)
    expected_room, expected = buffers(problem, CPU)
    gather_planes(problem.paged([t.cpu() for t in tensors]), problem.ids, expected, order=problem.order)
    room, found = buffers(problem, device)
    split_from_pages(plan_split(problem.paged(tensors), problem.ids, found, problem.order))
    assert raw(room) == raw(expected_room)


@given(problem=problems(DTYPES))
@example(problem=WIDE)
@example(problem=WIDE_TURNED)
@example(problem=LATENTS)
@settings(max_examples=40)
def test_kernel_merges_what_the_reference_merges(device: torch.device, problem: Problem) -> None:
    """Whatever the planes hold: most random ones were never split from anything."""
    tensors = problem.tensors(device)
    expected = [tensor.cpu().clone() for tensor in tensors]
    room, drawn = buffers(problem, device)
    room.copy_(random_bytes(room.numel(), device).view(room.shape))
    scatter_planes([b.cpu() for b in drawn], problem.ids, problem.paged(expected), order=problem.order)
    merge_into_pages(plan_merge(drawn, problem.ids, problem.paged(tensors), problem.order))
    assert raw(tensors) == raw(expected)


def test_every_half_comes_back(device: torch.device) -> None:
    payload = torch.arange(-(2**15), 2**15, dtype=torch.int16).to(device).view(torch.bfloat16).view(1, 2, 2, 64, 2, 128)
    planes = torch.empty(1, planes_nbytes(tuple(payload.shape[1:]), payload.dtype, "HND"), dtype=torch.uint8)
    planes = planes.to(device)
    back = torch.empty_like(payload)
    table = torch.tensor([[0]])
    split_from_pages(plan_split(PagedCaches.of_blocks(payload, "HND"), table, planes, "HND"))
    merge_into_pages(plan_merge(planes, table, PagedCaches.of_blocks(back, "HND"), "HND"))
    assert raw(back) == raw(payload)


def bf16(pages: int = 4) -> list[Tensor]:
    return [torch.ones(2, pages, 8, 2, 16, dtype=torch.bfloat16) for _ in range(2)]


TABLE = torch.tensor([[0, 3]])
NBYTES = planes_nbytes((2, 2, 16, 2, 16), torch.bfloat16, "NHD")


def room(count: int = 1, nbytes: int = NBYTES, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.full((count, nbytes), 7, dtype=dtype)


REFUSED: dict[str, tuple[list[Tensor], Tensor, Tensor | list[Tensor], str]] = {
    "have no planes": ([t.view(torch.int16) for t in bf16()], TABLE, room(), "NHD"),
    r"float64 have no planes": ([t.double() for t in bf16()], TABLE, room(), "NHD"),
    "names page 4": (bf16(), TABLE + 1, room(), "NHD"),
    "has shape": (bf16(), TABLE, room(nbytes=NBYTES - 1), "NHD"),
    "of 2 blocks": (bf16(), TABLE, list(room(2)), "NHD"),
    "payload is torch.int8": (bf16(), TABLE, room(dtype=torch.int8), "NHD"),
    "is not contiguous": (bf16(), TABLE, [room(NBYTES, 2)[:, 0]], "NHD"),
    "unknown payload order": (bf16(), TABLE, room(), "2PNHD"),
}


def scatter_into(caches: PagedCaches, table: Tensor, planes: Tensor, *, order: PayloadOrder) -> None:
    scatter_planes(planes, table, caches, order=order)


@pytest.mark.parametrize("move", [gather_planes, scatter_into])
@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_moves(message: str, move: Callable[..., None]) -> None:
    tensors, table, planes, order = REFUSED[message]
    before = raw([*tensors, *planes])
    with pytest.raises(ValueError, match=message):
        move(PagedCaches.of(tensors, "2PNHD"), table, planes, order=order)
    assert raw([*tensors, *planes]) == before


def test_destinations_that_overlap_are_refused() -> None:
    tensors = bf16(pages=8)
    caches, twice = PagedCaches.of(tensors, "2PNHD"), torch.tensor([[0, 1], [2, 0]])
    with pytest.raises(ValueError, match="names a page twice"):
        scatter_planes(room(2), twice, caches, order="NHD")
    with pytest.raises(ValueError, match="blocks of the payload overlap"):
        gather_planes(caches, twice, room().expand(2, -1), order="NHD")
    within = tensors[1].view(torch.uint8).flatten()[100 : 100 + NBYTES]
    with pytest.raises(ValueError, match="overlaps a cache"):
        gather_planes(caches, TABLE, [within], order="NHD")


def test_payloads_of_another_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are not \[blocks, layers, planes"):
        split_planes(torch.ones(1, 2, 3, 16, 2, 16, dtype=torch.bfloat16), room(), order="NHD")


def test_no_blocks_is_no_work(device: torch.device) -> None:
    caches = PagedCaches.of([t.to(device) for t in bf16()], "2PNHD")
    none = torch.empty(0, 2, dtype=torch.int64)
    split_from_pages(plan_split(caches, none, room(0).to(device), "NHD"))
    merge_into_pages(plan_merge([], none, caches, "NHD"))
    split_planes(torch.empty(0, 2, 2, 16, 2, 16, dtype=torch.bfloat16), room(0), order="NHD")
    merge_planes([], torch.empty(0, 2, 2, 16, 2, 16, dtype=torch.bfloat16), order="NHD")
