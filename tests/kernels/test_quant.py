"""Quantised blocks: the host codec's bits, the kernels' agreement with the reference, bounds, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.paged import POISON, Problem, problems, random_bytes, raw
from tierkv.kernels import quant_launch, quant_reference
from tierkv.kernels.coding import BlockShape, Float8, Scheme, Uniform, views
from tierkv.kernels.paged_caches import PagedCaches
from tierkv.kernels.quant import dequantize_blocks, dequantize_pages, quantize_blocks, quantize_pages
from tierkv.kernels.quant_steps import unpack
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import codec_by_name
from tierkv.storage.codecs.plane import expand, shrink

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LEVELS = {"int8": (0, 0), "eq2": (1 / 16, 1 / 16), "eq3": (1 / 8, 1 / 4), "eq4": (1 / 4, 1 / 2), "eq5": (1 / 2, 1)}
PLANES = ["k_peaks", "k_steps", "centers_low", "centers_high", "v_peaks", "v_steps", "k_codes", "v_codes"]

FUSED = Problem("PHN2D", "NHD", torch.bfloat16, 4, 8, 2, 24, 2, ((2, -1), (0, 3)), gap=16)
JOINED = Problem("2PNHD", "NHD", torch.float16, 3, 16, 3, 64, 1, ((1,), (0,)))
TURNED = Problem("2PNHD", "HND", torch.bfloat16, 3, 8, 2, 16, 1, ((2, 0),))
UNALIGNED = Problem("P2NHD", "HND", torch.bfloat16, 3, 3, 2, 5, 1, ((0, 2),), tail=1, skew=1)
LATENT = Problem("PND", "NHD", torch.float32, 2, 8, 1, 40, 2, ((1, 0),))


@st.composite
def shapes(draw: st.DrawFn) -> BlockShape:
    planes = draw(st.sampled_from([1, 2, 2]))
    heads = draw(st.integers(1, 3)) if planes == 2 else 1
    # with a single channel, numpy sums tokens by halves
    dim = draw(st.sampled_from([2, 5, 16, 24]))
    return BlockShape(
        draw(st.integers(1, 3)), planes, draw(st.integers(1, 40)), heads, dim, draw(st.sampled_from(["NHD", "HND"]))
    )


def fill(values: Tensor) -> None:
    """Fill K and V, ``[..., dim]``, with channels of different scale and offset.

    Values are small multiples of one power of two, so sums of their squares are exact in any order.
    """
    scale = 2.0 ** (torch.randint(0, 3, values.shape[-1:]) - torch.randint(0, 12, ()))
    offset = torch.randint(-3, 4, values.shape[-1:])
    values.copy_(((torch.randn(values.shape) * 12).round() + offset * 8) * scale)


def filled(count: int, shape: BlockShape, dtype: torch.dtype) -> Tensor:
    payloads = torch.empty(count, *shape.payload, dtype=dtype)
    fill(payloads)
    return payloads


def poisoned(count: int, scheme: Scheme, device: torch.device, gap: int = 0) -> Tensor:
    return torch.full((count, scheme.nbytes + gap), POISON, dtype=torch.uint8, device=device)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Compare bits, but of a NaN only that it is one."""
    return torch.equal(one.isnan(), other.isnan()) and raw(one.nan_to_num(0)) == raw(other.nan_to_num(0))


@given(shape=shapes(), dtype=st.sampled_from(DTYPES), level=st.sampled_from(sorted(LEVELS)))
@settings(max_examples=60)
def test_sections_are_the_planes_of_the_host_codec(shape: BlockShape, dtype: torch.dtype, level: str) -> None:
    payloads = filled(2, shape, dtype)
    scheme = Uniform(shape, LEVELS[level])
    coded, restored = poisoned(2, scheme, CPU), torch.empty_like(payloads)
    assert quantize_blocks(payloads, scheme, coded).all()
    dequantize_blocks(coded, scheme, restored)
    codec, layout = codec_by_name(level), BlockLayout(str(dtype)[6:], shape.payload, 2 if shape.order == "NHD" else 3)
    names = [name for name in PLANES if name in scheme.sections]
    for block in range(2):
        ours = [raw(views(scheme, coded)[name][block]) for name in names]
        sections = codec.encode(raw(payloads[block]), layout)
        planes = [bytes(expand(section, len(our), "plane")) for section, our in zip(sections, ours, strict=True)]
        assert ours == planes
        out = bytearray(len(raw(payloads[block])))
        shrunk = [memoryview(shrink(np.frombuffer(our, np.uint8))) for our in ours]
        codec.decode_into(shrunk, memoryview(out), layout)
        assert bytes(out) == raw(restored[block])


def schemes(problem: Problem) -> st.SearchStrategy[Scheme]:
    shape = BlockShape(problem.layers, problem.planes, problem.block_tokens, problem.heads, problem.dim, problem.order)
    levels = [Uniform(shape, fineness) for fineness in LEVELS.values()]
    return st.sampled_from([*levels, Float8(shape)])


@given(problem=problems(DTYPES), data=st.data())
@settings(max_examples=8)
@example(problem=FUSED, data=None)
@example(problem=JOINED, data=None)
@example(problem=TURNED, data=None)
@example(problem=UNALIGNED, data=None)
@example(problem=LATENT, data=None)
def test_kernels_code_what_the_reference_codes(
    device: torch.device, problem: Problem, data: st.DataObject | None
) -> None:
    for scheme in drawn(problem, data):
        tensors = problem.tensors(device)
        for tensor in tensors:
            fill(tensor)
        caches, gap = problem.paged(tensors), 16 * problem.gap
        expected, coded = (poisoned(len(problem.table), scheme, device, gap) for _ in range(2))
        blocks = quant_reference.gathered(caches, problem.ids.long(), scheme.shape)
        fits = quant_reference.encode(blocks, scheme, expected[:, : scheme.nbytes])
        found = quant_launch.encode(caches, problem.ids.long(), scheme, coded[:, : scheme.nbytes])
        assert found.tolist() == fits.tolist() == [True] * len(problem.table)
        assert raw(coded) == raw(expected)


@given(problem=problems(DTYPES), data=st.data())
@settings(max_examples=8)
@example(problem=FUSED, data=None)
@example(problem=JOINED, data=None)
@example(problem=TURNED, data=None)
@example(problem=UNALIGNED, data=None)
@example(problem=LATENT, data=None)
def test_kernels_restore_what_the_reference_restores(
    device: torch.device, problem: Problem, data: st.DataObject | None
) -> None:
    for scheme in drawn(problem, data):
        tensors = problem.tensors(device)
        expected = [tensor.clone() for tensor in tensors]
        coded = drawn_codes(len(problem.table), scheme, device)
        blocks = quant_reference.decode(coded, scheme, problem.dtype)
        quant_reference.scattered(blocks, problem.paged(expected), problem.ids.long(), scheme.shape)
        quant_launch.decode(coded, scheme, problem.ids.long(), problem.paged(tensors))
        assert all(same_numbers(tensor, want) for tensor, want in zip(tensors, expected, strict=True))


def drawn(problem: Problem, data: st.DataObject | None) -> list[Scheme]:
    """Return one drawn scheme, or for an example one of each kind."""
    if data is not None:
        return [data.draw(schemes(problem))]
    shape = BlockShape(problem.layers, problem.planes, problem.block_tokens, problem.heads, problem.dim, problem.order)
    return [Uniform(shape, LEVELS["eq3"]), Float8(shape)]


def drawn_codes(count: int, scheme: Scheme, device: torch.device) -> Tensor:
    """Return coded blocks of random codes and centers, with steps between 2**-52 and 2**-4."""
    coded = random_bytes(count * scheme.nbytes, device).view(count, -1)
    sections = views(scheme, coded)
    if isinstance(scheme, Float8):
        sections["scales"].copy_(2.0 ** torch.randint(-30, 5, sections["scales"].shape))
    for name in ("k_peaks", "v_peaks"):
        if name in sections:
            sections[name].copy_(torch.randint((127 - 20) << 3, (127 - 4) << 3, sections[name].shape))
    return coded


@given(shape=shapes(), dtype=st.sampled_from(DTYPES), level=st.sampled_from(sorted(LEVELS)))
@settings(max_examples=30)
def test_values_are_off_by_half_a_step_and_the_dtypes_own_error(
    shape: BlockShape, dtype: torch.dtype, level: str
) -> None:
    payloads = (torch.randn(2, *shape.payload) * torch.randn(shape.dim).exp() + 5 * torch.randn(shape.dim)).to(dtype)
    scheme = Uniform(shape, LEVELS[level])
    coded, restored = poisoned(2, scheme, CPU), torch.empty_like(payloads)
    assert quantize_blocks(payloads, scheme, coded).all()
    dequantize_blocks(coded, scheme, restored)
    sections = views(scheme, coded)
    k_step = unpack(sections["k_steps"], sections["k_peaks"])
    k_step = k_step[:, :, None] if shape.order == "NHD" else k_step[:, :, :, None]
    error = (payloads.double() - restored.double()).abs() - restored.double().abs() * torch.finfo(dtype).eps / 2
    # rounding of value / step, in a value of up to 2**15 steps, can move it across the middle of two by that much
    assert (error[:, :, 0] <= k_step.double() * (0.5 + 2**-7)).all()
    if shape.planes == 2:
        v_step = unpack(sections["v_steps"], sections["v_peaks"])[..., None]
        assert (error[:, :, 1] <= v_step.double() * (0.5 + 2**-15)).all()


@given(shape=shapes(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=20)
def test_float8_keeps_four_bits_of_every_value(shape: BlockShape, dtype: torch.dtype) -> None:
    payloads = (torch.randn(2, *shape.payload) * torch.randn(shape.dim).exp()).to(dtype)
    scheme = Float8(shape)
    coded, restored = poisoned(2, scheme, CPU), torch.empty_like(payloads)
    assert quantize_blocks(payloads, scheme, coded).all()
    dequantize_blocks(coded, scheme, restored)
    axes = (4, 5) if shape.order == "HND" else (3, 5)
    reach = payloads.double().abs().amax(axes, keepdim=True)
    error = (payloads.double() - restored.double()).abs()
    # the smallest step of a code is 2**-9 of the scale, and the scale at most reach / 224
    assert (error <= torch.maximum(payloads.double().abs() / 16, reach / 224 * 2**-10 + 2**-24)).all()


@given(dtype=st.sampled_from(DTYPES), level=st.sampled_from(sorted(LEVELS)))
@settings(max_examples=4)
def test_steps_of_v_agree_to_their_last_bit_whatever_the_numbers(
    device: torch.device, dtype: torch.dtype, level: str
) -> None:
    scheme = Uniform(BlockShape(2, 2, 16, 2, 24), LEVELS[level])
    payloads = torch.randn(2, *scheme.shape.payload).exp().to(dtype).to(device)
    expected, coded = poisoned(2, scheme, device), poisoned(2, scheme, device)
    caches, table = PagedCaches.of_blocks(payloads, "NHD"), torch.arange(2)[:, None]
    quant_reference.encode(payloads, scheme, expected)
    quant_launch.encode(caches, table, scheme, coded)
    for name, want in views(scheme, expected).items():
        found = views(scheme, coded)[name]
        if name == "v_codes":
            continue  # follow from the steps
        assert int((found.int() - want.int()).abs().max()) <= (name in ("v_steps", "v_peaks"))


@pytest.mark.parametrize("kind", [Uniform, Float8])
@pytest.mark.parametrize(
    ("dtype", "worst"),
    [
        (torch.bfloat16, torch.nan),
        (torch.float16, torch.inf),
        (torch.float32, -torch.inf),
        (torch.float16, 1.25 * 2.0**15),
        (torch.float32, -1.25 * 2.0**40),
    ],
)
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about numbers that mean nothing
def test_blocks_that_cannot_be_coded_are_told_apart(
    device: torch.device, kind: type[Scheme], dtype: torch.dtype, worst: float, kernel: bool
) -> None:
    scheme = kind(BlockShape(2, 2, 4, 1, 8))
    payloads = torch.ones(4, *scheme.shape.payload, dtype=dtype)
    limit = 2.0**15 if dtype == torch.float16 else 2.0**40
    payloads[0, 1, 0, 2, 0, 3] = worst
    payloads[2, 0, 1, 3, 0, 7] = worst
    payloads[3, 0, 1, 3, 0, 7] = -limit
    coded = poisoned(4, scheme, device)
    if kernel:
        caches = PagedCaches.of_blocks(payloads.to(device), "NHD")
        fits = quant_launch.encode(caches, torch.arange(4)[:, None], scheme, coded)
    else:
        fits = quantize_blocks(payloads.to(device), scheme, coded)
    assert fits.tolist() == [False, True, False, True]


def test_what_was_quantised_from_pages_comes_back_to_other_pages() -> None:
    problem = replace(FUSED, table=((2, 1),), layout="2PNHD")
    tensors = problem.tensors(CPU)
    for tensor in tensors:
        fill(tensor)
    before = [tensor.clone() for tensor in tensors]
    caches = problem.paged(tensors)
    shape = BlockShape(2, 2, 16, 2, 24)
    coded = poisoned(1, Uniform(shape), CPU)
    assert quantize_pages(caches, torch.tensor([[2, 1]]), Uniform(shape), coded).all()
    dequantize_pages(coded, Uniform(shape), torch.tensor([[0, -1]]), caches)
    for tensor, old in zip(tensors, before, strict=True):
        assert (tensor[:, 0].float() - old[:, 2].float()).abs().max() <= old[:, 2].float().abs().max() / 60
        assert raw(tensor[:, 1:]) == raw(old[:, 1:])


SHAPE = BlockShape(1, 2, 8, 2, 8)
PAGES = torch.zeros(2, 4, 8, 2, 8, dtype=torch.bfloat16)
CACHES = PagedCaches.of([PAGES], "2PNHD")
ROOM = torch.zeros(4, 2 * Uniform(SHAPE).nbytes, dtype=torch.uint8)


def room(count: int = 1, first: int = 0) -> Tensor:
    return ROOM[:count, first : first + Uniform(SHAPE).nbytes]


REFUSED = {
    "are not quantised": (PagedCaches.of([PAGES.view(torch.int16)], "2PNHD"), [[0]], SHAPE, room()),
    "the scheme is for": (CACHES, [[0]], replace(SHAPE, tokens=16), room()),
    "names page 4": (CACHES, [[4]], SHAPE, room()),
    "coded blocks are torch.uint8": (CACHES, [[0], [1]], SHAPE, room()),
    "coded blocks are torch.int8": (CACHES, [[0]], SHAPE, room().view(torch.int8)),
    "aligned to 16": (CACHES, [[0]], SHAPE, room(first=8)),
    "may not overlap": (CACHES, [[0], [1]], SHAPE, room().expand(2, -1)),
    "overlap a cache": (
        CACHES,
        [[0]],
        SHAPE,
        PAGES.view(torch.uint8).flatten()[: Uniform(SHAPE).nbytes][None],
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_moves(message: str) -> None:
    caches, table, shape, coded = REFUSED[message]
    before = raw([PAGES, ROOM])
    with pytest.raises(ValueError, match=message):
        quantize_pages(caches, torch.tensor(table), Uniform(shape), coded)
    with pytest.raises(ValueError, match=message):
        dequantize_pages(coded, Uniform(shape), torch.tensor(table), caches)
    assert raw([PAGES, ROOM]) == before


def test_a_page_is_not_restored_twice() -> None:
    with pytest.raises(ValueError, match="names a page twice"):
        dequantize_pages(room(2), Uniform(SHAPE), torch.tensor([[1], [1]]), CACHES)


def test_schemes_and_shapes_make_sense() -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        Uniform(SHAPE, (0.5, 1.5))
    with pytest.raises(ValueError, match="no block"):
        replace(SHAPE, heads=0)


def test_no_blocks_are_no_work(device: torch.device) -> None:
    payloads = torch.empty(0, *SHAPE.payload, dtype=torch.bfloat16, device=device)
    coded = poisoned(0, Uniform(SHAPE), device)
    assert quantize_blocks(payloads, Uniform(SHAPE), coded).shape == (0,)
    dequantize_blocks(coded, Uniform(SHAPE), payloads)
