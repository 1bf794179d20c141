"""Pages on a real GPU, while its streams are busy: what the engine does before and after cannot harm a copy."""

from __future__ import annotations

import pytest
import torch

from tests.engines.test_paged_device import LAYOUTS, caches_of, payload, spec_of
from tierkv.engines.paged import open_group, payload_memory
from tierkv.engines.paged_device import DevicePages

pytestmark = pytest.mark.gpu

HEADS, TOKENS, DIM = 4, 16, 64
BUSY = 40_000_000  # cycles: some 20 ms


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_leave_their_pages_and_return_to_others(cuda: torch.device, layout: str, parts: int) -> None:
    latent = layout in ("PND", "P1ND")
    heads = 1 if latent else HEADS
    spec = spec_of("bfloat16", "mla" if latent else "full", heads, 2 * TOKENS, DIM)
    caches, look = caches_of(layout, "bfloat16", heads, TOKENS, DIM, parts=parts, device=cuda)
    group = open_group(caches, spec, 0, TOKENS)
    assert isinstance(group, DevicePages)
    blocks = [[3, 1], [0, 5]]
    buffers = payload_memory(spec.layout().nbytes, 2, cuda)
    group.start_save(list(zip(blocks, buffers, strict=True))).wait()
    before = look()
    assert [bytes(buffer) for buffer in buffers] == [payload(spec, before, block) for block in blocks]
    group.load(buffers[0], [2, -1])
    wanted = [view.clone() for view in before]
    for view, old in zip(wanted, before, strict=True):
        view[:, 2] = old[:, 3]
    assert all(torch.equal(found, expected) for found, expected in zip(look(), wanted, strict=True))


def test_a_save_is_of_the_pages_as_they_were(cuda: torch.device) -> None:
    spec = spec_of("bfloat16", "full", HEADS, 2 * TOKENS, DIM)
    caches, _ = caches_of("PNH2D", "bfloat16", HEADS, TOKENS, DIM, device=cuda)
    group = DevicePages(caches, spec, 0, TOKENS)
    (buffer,) = payload_memory(spec.layout().nbytes, 1, cuda)
    for value in range(5):
        torch.cuda._sleep(BUSY)
        for cache in caches:
            cache.fill_(value)  # what the engine computes last is part of it
        copy = group.start_save([([1, 4], buffer)])
        for cache in caches:
            cache.fill_(-1)  # what it does afterwards is not
        copy.wait()
        assert bool((torch.frombuffer(buffer, dtype=torch.bfloat16) == value).all())


def test_a_load_comes_after_what_the_engine_had_queued(cuda: torch.device) -> None:
    spec = spec_of("bfloat16", "full", HEADS, 2 * TOKENS, DIM)
    caches, look = caches_of("PNH2D", "bfloat16", HEADS, TOKENS, DIM, device=cuda)
    group = DevicePages(caches, spec, 0, TOKENS)
    block = payload(spec, look(), [0, 1])
    torch.cuda._sleep(BUSY)
    for cache in caches:
        cache.fill_(-1)  # a step that is still running writes to pages that it has lost
    group.follow_engine()
    group.load(memoryview(block), [3, 4])
    torch.cuda.synchronize()
    assert payload(spec, look(), [3, 4]) == block
