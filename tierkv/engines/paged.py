"""Blocks between an engine's paged KV cache and payloads: what every engine with pages needs, whoever it is.

A block is some consecutive pages of every layer of a group. An engine names its pages by number; a number below 0 is a
page that is not there or not to be touched. `PagedGroup` says what can be done with them, `HostPages` does it by the
processor, `tierkv.engines.paged_device` by a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.errors import ConfigError, SpecMismatch
from tierkv.spec import KVSpec, Order

__all__ = ["Copy", "HostPages", "PagedGroup", "host_memory", "open_group", "payload_memory", "payload_order"]


class Copy(Protocol):
    """A copy out of pages that has been started."""

    def wait(self) -> None:
        """Block until the payloads are complete. Called on a background thread."""


class PagedGroup(Protocol):
    """The pages of one KV group, and how they become payloads. Safe to call from any thread."""

    def start_save(self, blocks: Sequence[tuple[Sequence[int], memoryview]]) -> Copy:
        """Start copying blocks, each its page numbers and a payload buffer, out of the cache.

        What the engine does to its pages after this returns no longer matters to the copy. The buffers belong to it
        until `Copy.wait` has returned. No page number may be below 0.
        """

    def load(self, payload: memoryview, pages: Sequence[int]) -> None:
        """Copy a payload into pages, leaving out those below 0. Blocks until the engine can read them.

        The pages may be written to as soon as what the engine had queued at the last `follow_engine` is over.
        """

    def follow_engine(self) -> None:
        """Let loads that begin from now on come after what this thread has queued on the device. Does not wait."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for: the copy was made at once."""


class HostPages:
    """Pages in memory that the processor reads and writes.

    Parameters
    ----------
    caches
        One tensor per layer, in the order of the spec's layers: ``[pages, heads, page_tokens, planes * dim]`` with K
        before V, or the same with every page cut into equal parts, ``[pages * parts, heads, page_tokens / parts,
        planes * dim]``. Any strides, but the last axis is contiguous.
    spec, group
        The KV group whose payloads these pages hold, in the order HND.
    page_tokens
        Tokens of one page; divides the spec's block.

    Raises
    ------
    SpecMismatch
        The tensors are not what the spec says.
    """

    def __init__(self, caches: Sequence[torch.Tensor], spec: KVSpec, group: int, page_tokens: int) -> None:
        layout = spec.layout(group)
        layers, planes, heads, block_tokens, dim = layout.shape
        row = np.dtype((np.void, dim * (layout.nbytes // math.prod(layout.shape))))
        if len(caches) != layers or block_tokens % page_tokens:
            raise SpecMismatch(
                f"{len(caches)} layers of pages of {page_tokens} tokens are not blocks of {layout.shape}"
            )
        self._row = row
        self._runs = [(layers, _pages(run, planes, heads, page_tokens, row)) for layers, run in _runs(caches)]
        parts, tokens = self._runs[0][1].shape[4:]
        self._shape = (layers, planes, heads, block_tokens // page_tokens, parts, tokens)

    def start_save(self, blocks: Sequence[tuple[Sequence[int], memoryview]]) -> Copy:
        for pages, out in blocks:
            payload = self._payload(out)
            for layers, cache in self._runs:
                for slot, page in enumerate(pages):
                    np.copyto(payload[layers, :, :, slot], cache[:, page])
        return _DONE

    def load(self, payload: memoryview, pages: Sequence[int]) -> None:
        block = self._payload(payload)
        for layers, cache in self._runs:
            for slot, page in enumerate(pages):
                if page >= 0:
                    np.copyto(cache[:, page], block[layers, :, :, slot])

    def follow_engine(self) -> None:
        """Nothing to do: the processor queues nothing."""

    def _payload(self, memory: memoryview) -> NDArray[np.void]:
        """A payload as rows of one head: ``[layers, planes, heads, pages, parts, tokens]``."""
        return np.frombuffer(memory, self._row).reshape(self._shape)


_DONE = _Done()


def open_group(caches: Sequence[torch.Tensor], spec: KVSpec, group: int, page_tokens: int) -> PagedGroup:
    """Return the pages of a KV group for the device they are on.

    Raises `ConfigError` for a device whose pages nothing here moves, and `SpecMismatch` for pages of another shape.
    """
    device = caches[0].device.type
    payload_order(device)
    if device == "cpu":
        return HostPages(caches, spec, group, page_tokens)
    from tierkv.engines.paged_device import DevicePages

    return DevicePages(caches, spec, group, page_tokens)


def payload_order(device: str) -> Order:
    """Return the payload order that copies fastest from pages on a device. Raises `ConfigError` for an unknown one."""
    match device:
        case "cpu":
            return "HND"
        case "cuda":
            return "NHD"  # of most engines on GPUs: what is contiguous in their pages then is so in payloads
    raise ConfigError(
        f"KV pages on a device of type {device!r} cannot be moved",
        remedy="run the engine on a CPU or an NVIDIA GPU, or without tierkv",
    )


def host_memory(nbytes: int) -> memoryview:
    """Return memory for payloads, its pages touched already: first touches cost more than the copies themselves."""
    memory = np.empty(nbytes, np.uint8)
    memory.fill(0)
    return memory.data


def payload_memory(nbytes: int, count: int, device: torch.device) -> list[memoryview]:
    """Return memory for payloads of blocks on a device, page-locked where the device copies by itself. Blocks."""
    if device.type == "cpu":
        return [host_memory(nbytes) for _ in range(count)]
    # One allocation: torch rounds each up to a power of two.
    whole = torch.empty(nbytes * count, dtype=torch.uint8, pin_memory=True).numpy()
    return [whole[start : start + nbytes].data for start in range(0, nbytes * count, nbytes)]


def _runs(caches: Sequence[torch.Tensor]) -> list[tuple[slice, torch.Tensor]]:
    """Cut layers into runs that lie evenly in one allocation, each as one tensor ``[layers, ...]``.

    Engines allocate all layers of a group at once: then a page of all of them is one copy instead of one per layer.
    """
    first = caches[0]
    steps = {after.storage_offset() - cache.storage_offset() for cache, after in pairwise(caches)}
    one = {(cache.untyped_storage().data_ptr(), cache.shape, cache.stride(), cache.dtype) for cache in caches}
    if len(one) == 1 and len(steps) <= 1 and min(steps, default=1) > 0:
        step = steps.pop() if steps else 1
        return [(slice(None), first.as_strided((len(caches), *first.shape), (step, *first.stride())))]
    return [(slice(layer, layer + 1), cache.unsqueeze(0)) for layer, cache in enumerate(caches)]


def _pages(run: torch.Tensor, planes: int, heads: int, page_tokens: int, row: np.dtype[np.void]) -> NDArray[np.void]:
    """View some layers' cache as ``[layers, pages, planes, heads, parts, tokens]`` rows."""
    layers, *shape = run.shape
    parts = page_tokens // shape[2] if len(shape) == 4 and shape[2] and page_tokens % shape[2] == 0 else 0
    width = shape[-1] * run.element_size()
    if not parts or shape[0] % parts or shape[1] != heads or width != planes * row.itemsize or run.stride(-1) != 1:
        raise SpecMismatch(
            f"an engine's cache of shape {tuple(shape)} and {run.dtype} does not hold {heads} heads of {planes} x "
            f"{row.itemsize} bytes in pages of {page_tokens} tokens",
            remedy="report the model and the engine's version: its pages have a layout that tierkv does not know",
        )
    # Rows are copied as opaque bytes: whole heads at once, and no number is ever looked at.
    rows = run.view(torch.uint8).numpy().view(row)
    cut = rows.reshape(layers, shape[0] // parts, parts, heads, shape[2], planes)
    return cut.transpose(0, 1, 5, 3, 2, 4)
