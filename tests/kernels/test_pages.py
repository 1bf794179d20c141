"""Pages to blocks and back: what moves, what stays, and what is refused before a byte moves."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from tests.kernels.paged import POISON, Problem, problems, raw
from tierkv.kernels.page_kernel import move_pages
from tierkv.kernels.page_move import plan_gather, plan_scatter
from tierkv.kernels.paged_caches import CacheLayout, PagedCaches
from tierkv.kernels.pages import gather_blocks, scatter_blocks

CPU = torch.device("cpu")
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64]

# Strides are multiples of 4 bytes, rows are 10 bytes wide.
NARROW_ROWS = Problem("2PNHD", "NHD", torch.bfloat16, 3, 2, 2, 5, 2, ((2, 0),), tail=1)
# What each common engine has, moved in the other order than it keeps.
TURNED = Problem("P2NHD", "HND", torch.float16, 4, 16, 3, 8, 2, ((-1, 1, 2), (3, -1, 0)), scattered=True)
HEADS_FIRST = Problem("PHN2D", "NHD", torch.float32, 4, 8, 2, 24, 1, ((2, 3),))


@given(problem=problems(DTYPES))
@settings(max_examples=25)
def test_gather_is_what_the_layouts_say(problem: Problem) -> None:
    tensors, payloads = problem.tensors(CPU), problem.payloads(CPU)
    gather_blocks(problem.paged(tensors), problem.ids, payloads, order=problem.order)
    for page, source, row in problem.rows(tensors, payloads):
        assert raw(row) == (raw(source) if page >= 0 else bytes(len(raw(row))))


@given(problem=problems(DTYPES))
@settings(max_examples=25)
def test_scatter_is_what_the_layouts_say_and_touches_nothing_else(problem: Problem) -> None:
    tensors, payloads = problem.tensors(CPU), problem.payloads(CPU)
    expected = [tensor.clone() for tensor in tensors]
    for page, target, row in problem.rows(expected, payloads):
        if page >= 0:
            target.view(torch.uint8).copy_(row.view(torch.uint8))
    scatter_blocks(payloads, problem.ids, problem.paged(tensors), order=problem.order)
    assert raw(tensors) == raw(expected)


@given(problem=problems(DTYPES))
@example(problem=NARROW_ROWS)
@example(problem=TURNED)
@example(problem=HEADS_FIRST)
@settings(max_examples=60)
def test_kernel_gathers_what_the_reference_gathers(device: torch.device, problem: Problem) -> None:
    tensors = problem.tensors(device)
    padded, payloads = problem.poisoned(device)
    _, expected = problem.poisoned(CPU)
    gather_blocks(problem.paged([t.cpu() for t in tensors]), problem.ids, expected, order=problem.order)
    move_pages(plan_gather(problem.paged(tensors), problem.ids, payloads, problem.order), gather=True)
    assert raw(payloads) == raw(expected)
    assert set(problem.gaps(padded)) <= {POISON}


@given(problem=problems(DTYPES))
@example(problem=NARROW_ROWS)
@example(problem=TURNED)
@example(problem=HEADS_FIRST)
@settings(max_examples=60)
def test_kernel_scatters_what_the_reference_scatters(device: torch.device, problem: Problem) -> None:
    payloads, tensors = problem.payloads(device), problem.tensors(device)
    expected = [tensor.cpu().clone() for tensor in tensors]
    scatter_blocks([block.cpu() for block in payloads], problem.ids, problem.paged(expected), order=problem.order)
    move_pages(plan_scatter(payloads, problem.ids, problem.paged(tensors), problem.order), gather=False)
    assert raw(tensors) == raw(expected)


@given(problem=problems(DTYPES))
@settings(max_examples=25)
def test_what_is_scattered_is_gathered_again(device: torch.device, problem: Problem) -> None:
    payloads, caches = problem.payloads(device), problem.paged(problem.tensors(device))
    _, back = problem.poisoned(device)
    scatter_blocks(payloads, problem.ids, caches, order=problem.order)
    gather_blocks(caches, problem.ids, back, order=problem.order)
    live = (problem.ids >= 0).repeat_interleave(problem.page_tokens, dim=1)
    axis = 2 if problem.order == "NHD" else 3
    for block, tokens in enumerate(live):
        at = tokens.nonzero().flatten().to(device)
        assert raw(back[block].view(torch.uint8).unflatten(-1, (problem.dim, -1)).index_select(axis, at)) == raw(
            payloads[block].view(torch.uint8).unflatten(-1, (problem.dim, -1)).index_select(axis, at)
        )


def test_payloads_in_pinned_memory_need_no_copy_of_their_own(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("memory that two devices see needs a GPU")
    problem = TURNED
    tensors = problem.tensors(device)
    blocks = [torch.zeros(problem.block_shape, dtype=problem.dtype).pin_memory() for _ in problem.table]
    _, expected = problem.poisoned(CPU)
    gather_blocks(problem.paged([t.cpu() for t in tensors]), problem.ids, expected, order=problem.order)
    gather_blocks(problem.paged(tensors), problem.ids, blocks, order=problem.order)
    torch.cuda.synchronize()
    assert raw(blocks) == raw(expected)


def nhd(pages: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(2, pages, 8, 2, 16, dtype=dtype)


def blocks(count: int = 1, layers: int = 2, tokens: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((count, layers, 2, tokens, 2, 16), 2, dtype=dtype)


TABLE = torch.tensor([[0, 3]])

REFUSED_CACHES: dict[str, tuple[list[Tensor], str]] = {
    "there is no cache": ([], "2PNHD"),
    "cache 1 differs from cache 0": ([nhd(), nhd(pages=5)], "2PNHD"),
    "its stride is 16": ([nhd().transpose(3, 4)], "2PNHD"),
    "is empty": ([nhd(pages=0)], "2PNHD"),
    "cannot be moved": ([nhd(dtype=torch.complex128)], "2PNHD"),
    "unknown cache layout 'NHD'": ([nhd()], "NHD"),
    "is not 2PNHD": ([torch.ones(3, 2, 8, 2, 16)], "2PNHD"),
    "is not P2NHD": ([torch.ones(2, 3, 8, 2, 16)], "P2NHD"),
    "is not PHN2D": ([torch.ones(4, 8, 2, 15)], "PHN2D"),
    "is not PND": ([torch.ones(4, 8, 1, 16)], "PND"),
}


@pytest.mark.parametrize("message", REFUSED_CACHES)
def test_caches_that_do_not_fit_their_layout_are_refused(message: str) -> None:
    tensors, layout = REFUSED_CACHES[message]
    with pytest.raises(ValueError, match=message):
        PagedCaches.of(tensors, layout)  # type: ignore[arg-type]


def test_a_shape_that_two_layouts_have_is_read_as_the_caller_says() -> None:
    tensor = torch.arange(2 * 2 * 4, dtype=torch.int32).view(2, 2, 4, 1, 1)
    out = torch.empty(1, 1, 2, 4, 1, 1, dtype=torch.int32)
    page_one: dict[CacheLayout, list[list[int]]] = {
        "2PNHD": tensor[:, 1].flatten(1).tolist(),
        "P2NHD": tensor[1].flatten(1).tolist(),
    }
    for layout, expected in page_one.items():
        gather_blocks(PagedCaches.of([tensor], layout), torch.tensor([[1]]), out, order="NHD")
        assert out.flatten(3)[0, 0].tolist() == expected


REFUSED_BOTH_WAYS: dict[str, tuple[Tensor, Tensor | list[Tensor], str]] = {
    "names page 4 of a cache of 4": (torch.tensor([[0, 4]]), blocks(), "NHD"),
    "int32 or int64": (torch.tensor([[0.0, 1.0]]), blocks(), "NHD"),
    "block table has shape": (torch.tensor([0, 1]), blocks(), "NHD"),
    "pages per block": (torch.empty(1, 0, dtype=torch.int64), blocks(), "NHD"),
    "payload is torch.float16": (TABLE, blocks(dtype=torch.float16), "NHD"),
    "has shape .*, not .*, 16, 2, 16": (TABLE, blocks(tokens=12), "NHD"),
    "has shape .*, not .*, 2, 16, 16": (TABLE, blocks(), "HND"),
    "block 0 has shape": (TABLE, blocks(layers=3), "NHD"),
    "payload has shape": (TABLE, blocks(count=2), "NHD"),
    "of 2 blocks": (TABLE, list(blocks(count=2)), "NHD"),
    "of block 1 has shape": (TABLE.expand(2, 2) - 4, [*blocks(), *blocks(layers=1)], "NHD"),
    "is not contiguous": (TABLE, blocks().transpose(4, 5).contiguous().transpose(4, 5), "NHD"),
    "unknown payload order": (TABLE, blocks(), "DHN"),
}


def scatter_into(caches: PagedCaches, table: Tensor, payload: Tensor | Sequence[Tensor], *, order: str) -> None:
    scatter_blocks(payload, table, caches, order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize("move", [gather_blocks, scatter_into])
@pytest.mark.parametrize("message", REFUSED_BOTH_WAYS)
def test_what_does_not_fit_is_refused_before_a_byte_moves(message: str, move: Callable[..., None]) -> None:
    table, payload, order = REFUSED_BOTH_WAYS[message]
    tensors = [nhd(), nhd()]
    before = raw([*tensors, *payload])
    with pytest.raises(ValueError, match=message):
        move(PagedCaches.of(tensors, "2PNHD"), table, payload, order=order)
    assert raw([*tensors, *payload]) == before


def test_blocks_that_overlap_are_refused_by_gather_only() -> None:
    caches, table = PagedCaches.of([nhd(), nhd()], "2PNHD"), torch.tensor([[0, 3], [1, 2]])
    for payload in (blocks().expand(2, -1, -1, -1, -1, -1), [blocks()[0]] * 2):
        with pytest.raises(ValueError, match="blocks of the payload overlap"):
            gather_blocks(caches, table, payload, order="NHD")
        scatter_blocks(payload, table, caches, order="NHD")


def overlapping_pages() -> Tensor:
    return torch.ones(2 * 4 * 256, dtype=torch.bfloat16).as_strided((2, 4, 8, 2, 16), (1024, 255, 32, 16, 1))


REPEATED = nhd()
REFUSED_BY_SCATTER = {
    "names a page twice": ([nhd(), nhd()], torch.tensor([[1, 2], [3, 1]]), blocks(count=2)),
    "two layers": ([REPEATED, REPEATED], TABLE, blocks()),
    "two pages": ([overlapping_pages()], TABLE, blocks(layers=1)),
}


@pytest.mark.parametrize("message", REFUSED_BY_SCATTER)
def test_overlapping_destinations_are_refused_by_scatter_only(message: str) -> None:
    tensors, table, payload = REFUSED_BY_SCATTER[message]
    caches, before = PagedCaches.of(tensors, "2PNHD"), raw(tensors)
    with pytest.raises(ValueError, match=message):
        scatter_blocks(payload, table, caches, order="NHD")
    assert raw(tensors) == before
    gather_blocks(caches, table, payload, order="NHD")
    assert raw(tensors) == before


def test_payload_inside_a_cache_is_refused() -> None:
    memory = torch.ones(3, 2 * 4 * 8 * 2 * 16, dtype=torch.bfloat16)
    caches = PagedCaches.of([row.view(2, 4, 8, 2, 16) for row in (memory[0], memory[2])], "2PNHD")
    table = torch.tensor([[1]])
    for inside in (memory[0], memory[2, -1024:], memory.flatten()[2048 + 1025 :]):
        with pytest.raises(ValueError, match="payload overlaps a cache"):
            gather_blocks(caches, table, inside[:1024].view(1, 2, 2, 8, 2, 16), order="NHD")
    gather_blocks(caches, table, memory[1, :1024].view(1, 2, 2, 8, 2, 16), order="NHD")


def test_a_null_page_may_appear_many_times() -> None:
    tensors = [nhd(), nhd()]
    scatter_blocks(blocks(count=2), torch.tensor([[-1, 0], [-1, -1]]), PagedCaches.of(tensors, "2PNHD"), order="NHD")
    assert all(float(cache[:, 0].min()) == 2 and float(cache[:, 1:].max()) == 1 for cache in tensors)


@pytest.mark.parametrize("payload", [blocks(0, 1), []])
def test_no_blocks_is_no_work(device: torch.device, payload: Tensor | list[Tensor]) -> None:
    tensors, table = [nhd().to(device)], torch.empty(0, 2, dtype=torch.int64)
    caches = PagedCaches.of(tensors, "2PNHD")
    move_pages(plan_gather(caches, table, payload, "NHD"), gather=True)
    scatter_blocks(payload, table, caches, order="NHD")
    assert float(tensors[0].min()) == 1
