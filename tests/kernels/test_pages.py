"""Pages to blocks and back: what moves, what stays, and what is refused before a byte moves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierkv.kernels.page_kernel import move_pages
from tierkv.kernels.page_move import plan_gather, plan_scatter
from tierkv.kernels.pages import gather_blocks, scatter_blocks

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64]
POISON = 0xA5


@dataclass(frozen=True)
class Problem:
    """One drawn move. `caches` and `payload` make its buffers of random bytes, so NaNs of every kind are among them."""

    order: str
    dtype: torch.dtype
    pages: int
    page_tokens: int
    heads: int
    dim: int
    layers: int
    table: tuple[tuple[int, ...], ...]
    interleaved: bool
    tail: int
    skew: int
    gap: int

    @property
    def cache_shape(self) -> tuple[int, ...]:
        if self.order == "NHD":
            return (2, self.pages, self.page_tokens, self.heads, self.dim)
        return (self.pages, self.heads, self.page_tokens, 2 * self.dim)

    @property
    def ids(self) -> Tensor:
        return torch.tensor(self.table, dtype=torch.int32).reshape(len(self.table), -1)

    def caches(self, device: torch.device) -> list[Tensor]:
        """Layers apart or interleaved in one allocation, `skew` elements into it, `tail` unused elements per row."""
        shape = (*self.cache_shape[:-1], self.cache_shape[-1] + self.tail)
        count = self.layers * torch.Size(shape).numel()
        flat = random_bytes((count + self.skew) * self.dtype.itemsize, device).view(self.dtype)[self.skew :]
        if self.interleaved:
            layers = flat.view(shape[0], self.layers, *shape[1:]).unbind(1)
        else:
            layers = flat.view(self.layers, *shape).unbind(0)
        return [layer[..., : self.cache_shape[-1]] for layer in layers]

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.layers, 2, self.ids.shape[1] * self.page_tokens, self.heads, self.dim)

    def padded_blocks(self, device: torch.device) -> Tensor:
        """Random payloads in rows, with `gap` elements behind each."""
        row = torch.Size(self.block_shape).numel() + self.gap
        return random_bytes(len(self.table) * row * self.dtype.itemsize, device).view(self.dtype).view(-1, row)

    def payload(self, device: torch.device) -> Tensor:
        return self.without_gaps(self.padded_blocks(device))

    def without_gaps(self, padded: Tensor) -> Tensor:
        return padded[:, : padded.shape[1] - self.gap].view(-1, *self.block_shape)


def random_bytes(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8).to(device)


def raw(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    pages = draw(st.integers(1, 6))
    pages_per_block = draw(st.integers(1, 3))
    ids = draw(st.permutations([*range(pages), -1, -7, -1]))
    blocks = draw(st.integers(0, len(ids) // pages_per_block))
    return Problem(
        order=draw(st.sampled_from(["NHD", "HND"])),
        dtype=draw(st.sampled_from(DTYPES)),
        pages=pages,
        page_tokens=draw(st.sampled_from([1, 2, 3, 8, 16])),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 2, 5, 8, 24, 64])),
        layers=draw(st.integers(1, 3)),
        table=tuple(tuple(ids[b * pages_per_block : (b + 1) * pages_per_block]) for b in range(blocks)) or ((-1,),),
        interleaved=draw(st.booleans()),
        tail=draw(st.sampled_from([0, 0, 0, 1, 8])),
        skew=draw(st.sampled_from([0, 0, 1, 2, 8])),
        gap=draw(st.sampled_from([0, 0, 1, 16])),
    )


# Strides are multiples of 4 bytes, rows are 10 bytes wide.
NARROW_ROWS = Problem("NHD", torch.bfloat16, 3, 2, 2, 5, 2, ((2, 0),), interleaved=False, tail=1, skew=0, gap=0)


def page_of(cache: Tensor, order: str, plane: int, page: int, token: int, head: int) -> Tensor:
    """One token's K (plane 0) or V (plane 1) of one head, by the definition of the layout."""
    if order == "NHD":
        return cache[plane, page, token, head]
    dim = cache.shape[-1] // 2
    return cache[page, head, token, plane * dim : (plane + 1) * dim]


def rows(problem: Problem, caches: list[Tensor], payload: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (page id, place in the cache, place in the payload) for every row, straight from the definition."""
    for block, ids in enumerate(problem.table):
        for nth, page in enumerate(ids):
            for layer, cache in enumerate(caches):
                for plane in range(2):
                    for token in range(problem.page_tokens):
                        for head in range(problem.heads):
                            row = payload[block, layer, plane, nth * problem.page_tokens + token, head]
                            yield page, page_of(cache, problem.order, plane, max(page, 0), token, head), row


@given(problem=problems())
@settings(max_examples=25)
def test_gather_is_what_the_layouts_say(problem: Problem) -> None:
    cpu = torch.device("cpu")
    caches, payload = problem.caches(cpu), problem.payload(cpu)
    gather_blocks(caches, problem.ids, payload)
    for page, source, row in rows(problem, caches, payload):
        assert raw(row) == (raw(source) if page >= 0 else bytes(len(raw(row))))


@given(problem=problems())
@settings(max_examples=25)
def test_scatter_is_what_the_layouts_say_and_touches_nothing_else(problem: Problem) -> None:
    cpu = torch.device("cpu")
    caches, payload = problem.caches(cpu), problem.payload(cpu)
    expected = [cache.clone() for cache in caches]
    for page, target, row in rows(problem, expected, payload):
        if page >= 0:
            target.view(torch.uint8).copy_(row.view(torch.uint8))
    scatter_blocks(payload, problem.ids, caches)
    assert [raw(cache) for cache in caches] == [raw(cache) for cache in expected]


@given(problem=problems())
@example(problem=NARROW_ROWS)
@settings(max_examples=60)
def test_kernel_gathers_what_the_reference_gathers(device: torch.device, problem: Problem) -> None:
    caches = problem.caches(device)
    padded = problem.padded_blocks(device)
    padded.flatten().view(torch.uint8).fill_(POISON)
    payload = problem.without_gaps(padded)
    expected = torch.empty(payload.shape, dtype=payload.dtype)
    gather_blocks([cache.cpu() for cache in caches], problem.ids, expected)
    move_pages(plan_gather(caches, problem.ids, payload), gather=True)
    assert raw(payload) == raw(expected)
    assert set(raw(padded[:, padded.shape[1] - problem.gap :])) <= {POISON}


@given(problem=problems())
@example(problem=NARROW_ROWS)
@settings(max_examples=60)
def test_kernel_scatters_what_the_reference_scatters(device: torch.device, problem: Problem) -> None:
    payload, caches = problem.payload(device), problem.caches(device)
    expected = [cache.cpu().clone() for cache in caches]
    scatter_blocks(payload.cpu().contiguous(), problem.ids, expected)
    move_pages(plan_scatter(payload, problem.ids, caches), gather=False)
    assert [raw(cache) for cache in caches] == [raw(cache) for cache in expected]


@given(problem=problems())
@settings(max_examples=25)
def test_what_is_scattered_is_gathered_again(device: torch.device, problem: Problem) -> None:
    payload, caches = problem.payload(device), problem.caches(device)
    back = torch.empty(payload.shape, dtype=payload.dtype, device=device)
    scatter_blocks(payload, problem.ids, caches)
    gather_blocks(caches, problem.ids, back)
    live = (problem.ids >= 0).repeat_interleave(problem.page_tokens, dim=1)
    for block in range(len(problem.table)):
        assert raw(back[block][:, :, live[block]]) == raw(payload[block][:, :, live[block]])


def nhd(pages: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(2, pages, 8, 2, 16, dtype=dtype)


def blocks(count: int = 1, layers: int = 2, tokens: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((count, layers, 2, tokens, 2, 16), 2, dtype=dtype)


TABLE = torch.tensor([[0, 3]])

REFUSED_BOTH_WAYS = {
    "no cache": ([], TABLE, blocks(layers=0)),
    "differs from cache 0": ([nhd(), nhd(pages=5)], TABLE, blocks()),
    "stride": ([nhd().transpose(3, 4)] * 1, TABLE, blocks(layers=1)),
    "names page 4 of a cache of 4": ([nhd(), nhd()], torch.tensor([[0, 4]]), blocks()),
    "int32 or int64": ([nhd(), nhd()], torch.tensor([[0.0, 1.0]]), blocks()),
    "block table has shape": ([nhd(), nhd()], torch.tensor([[0, 1, 2]]), blocks()),
    "payload is torch.float16": ([nhd(), nhd()], TABLE, blocks(dtype=torch.float16)),
    "a multiple of 8": ([nhd(), nhd()], TABLE, blocks(tokens=12)),
    "payload has shape": ([nhd(), nhd()], TABLE, blocks(layers=3)),
    "contiguous": ([nhd(), nhd()], TABLE, blocks().transpose(4, 5).contiguous().transpose(4, 5)),
    "blocks of the payload overlap": ([nhd(), nhd()], TABLE.expand(2, 2), blocks().expand(2, -1, -1, -1, -1, -1)),
    "is neither": ([torch.ones(3, 4, 8, 2, 16, dtype=torch.bfloat16)], TABLE, blocks(layers=1)),
    "is empty": ([nhd(pages=0)], TABLE, blocks(layers=1)),
    "cannot be moved": ([nhd(dtype=torch.complex128)], TABLE, blocks(layers=1, dtype=torch.complex128)),
}


def scatter_into(caches: list[Tensor], table: Tensor, payload: Tensor) -> None:
    scatter_blocks(payload, table, caches)


@pytest.mark.parametrize("move", [gather_blocks, scatter_into])
@pytest.mark.parametrize("message", REFUSED_BOTH_WAYS)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    message: str, move: Callable[[list[Tensor], Tensor, Tensor], None]
) -> None:
    caches, table, payload = REFUSED_BOTH_WAYS[message]
    before = [raw(t) for t in (*caches, payload)]
    with pytest.raises(ValueError, match=message):
        move(caches, table, payload)
    assert [raw(t) for t in (*caches, payload)] == before


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
    caches, table, payload = REFUSED_BY_SCATTER[message]
    before = [raw(cache) for cache in caches]
    with pytest.raises(ValueError, match=message):
        scatter_blocks(payload, table, caches)
    assert [raw(cache) for cache in caches] == before
    gather_blocks(caches, table, payload)
    assert [raw(cache) for cache in caches] == before


def test_payload_inside_a_cache_is_refused() -> None:
    memory = torch.ones(2 * 4 * 8 * 2 * 16, dtype=torch.bfloat16)
    cache = memory.view(2, 4, 8, 2, 16)
    payload = memory[: 2 * 8 * 2 * 16].view(1, 1, 2, 8, 2, 16)
    with pytest.raises(ValueError, match="payload overlaps cache 0"):
        gather_blocks([cache], torch.tensor([[1]]), payload)


def test_a_null_page_may_appear_many_times() -> None:
    caches, payload = [nhd(), nhd()], blocks(count=2)
    scatter_blocks(payload, torch.tensor([[-1, 0], [-1, -1]]), caches)
    assert all(float(cache[:, 0].min()) == 2 and float(cache[:, 1:].max()) == 1 for cache in caches)


def test_no_blocks_is_no_work(device: torch.device) -> None:
    caches = [nhd().to(device)]
    move_pages(plan_gather(caches, torch.empty(0, 2, dtype=torch.int64), blocks(0, 1).to(device)), gather=True)
    scatter_blocks(blocks(0, 1).to(device), torch.empty(0, 2, dtype=torch.int64), caches)
    assert float(caches[0].min()) == 1
