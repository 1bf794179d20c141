"""Blocks between pages on a GPU and payloads in host memory.

A kernel gathers blocks out of their pages on the engine's own stream, at the speed of the device's memory, and the
engine goes on; they cross the bus behind its back. What comes in crosses the bus on a stream beside the engine's, and a
kernel scatters it into pages that the engine does not use yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from tierkv.engines.page_layouts import known_pages
from tierkv.engines.paged import Copy, payload_memory
from tierkv.kernels.pages import gather_blocks, scatter_blocks
from tierkv.spec import KVSpec

__all__ = ["DevicePages"]

_BUFFER_BYTES = 4 << 20


class _Queued:
    """Work on a stream up to an event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class DevicePages:
    """Pages in the memory of a GPU. See `tierkv.engines.paged.PagedGroup`.

    Takes as much of the GPU's memory as the payload buffers that blocks are ever saved to, which should be few and the
    same ones, and one block for loads.

    Parameters
    ----------
    caches, spec, group, page_tokens
        See `tierkv.engines.page_layouts.known_pages`.

    Raises
    ------
    SpecMismatch
        The tensors are not what the spec says, or can be read in two ways.
    """

    def __init__(self, caches: Sequence[torch.Tensor], spec: KVSpec, group: int, page_tokens: int) -> None:
        self._caches, self._parts = known_pages(caches, spec, group, page_tokens)
        self._order = spec.order
        self._shape = spec.layout(group).shape
        self._nbytes = spec.layout(group).nbytes
        self._pages_per_block = spec.block_tokens // page_tokens
        self._runtime = torch.get_device_module(self._caches.device)
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._loading = Lock()
        with torch.cuda.device_of(caches[0]):  # type: ignore[no-untyped-call]
            self._outward, self._inward = self._runtime.Stream(), self._runtime.Stream()
            self._arriving = self._room()
            buffers = payload_memory(min(_BUFFER_BYTES, self._nbytes), 2, self._caches.device)
            self._buffers = [(_tensor(buffer), self._runtime.Event()) for buffer in buffers]
            self._compile()

    def start_save(self, blocks: Sequence[tuple[Sequence[int], memoryview]]) -> Copy:
        staged = [self._staging(out) for _, out in blocks]
        with torch.cuda.device_of(self._arriving):  # type: ignore[no-untyped-call]
            # On the engine's stream: after what has filled the pages, before whatever changes them.
            gather_blocks(
                self._caches,
                self._table([pages for pages, _ in blocks]),
                [self._payload(room) for _, room in staged],
                order=self._order,
            )
            self._outward.wait_stream(self._runtime.current_stream())
            with self._runtime.stream(self._outward):
                for out, room in staged:
                    out.copy_(room, non_blocking=True)
            return self._mark(self._outward)

    def load(self, payload: memoryview, pages: Sequence[int]) -> None:
        source = np.frombuffer(payload, np.uint8)
        with self._loading, torch.cuda.device_of(self._arriving), self._runtime.stream(self._inward):  # type: ignore[no-untyped-call]
            for number, start in enumerate(range(0, self._nbytes, _BUFFER_BYTES)):
                part = source[start : start + _BUFFER_BYTES]
                buffer, used = self._buffers[number % 2]
                used.synchronize()
                np.copyto(buffer.numpy()[: len(part)], part)
                self._arriving[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                used.record(self._inward)
            scatter_blocks([self._payload(self._arriving)], self._table([pages]), self._caches, order=self._order)
            self._mark(self._inward).wait()

    def follow_engine(self) -> None:
        with torch.cuda.device_of(self._arriving):  # type: ignore[no-untyped-call]
            self._inward.wait_stream(self._runtime.current_stream())

    def _compile(self) -> None:
        """Compile the kernels now: a step of the engine would have to wait for it."""
        room, nowhere = [self._payload(self._arriving)], self._table([[-1] * self._pages_per_block])
        gather_blocks(self._caches, nowhere, room, order=self._order)
        scatter_blocks(room, nowhere, self._caches, order=self._order)
        self.follow_engine()

    def _mark(self, stream: Any) -> _Queued:
        event = self._runtime.Event()
        event.record(stream)
        return _Queued(event)

    def _staging(self, out: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a payload buffer and the device memory that is kept for it: free whenever the buffer is."""
        host = _tensor(out)
        staged = self._staged.get(host.data_ptr())
        if staged is None:
            staged = self._staged[host.data_ptr()] = (host, self._room())
        return staged

    def _room(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._caches.device)

    def _payload(self, room: torch.Tensor) -> torch.Tensor:
        return room.view(self._caches.dtype).view(self._shape)

    def _table(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a block table of the parts of pages."""
        pages = torch.tensor(blocks, dtype=torch.int64).view(len(blocks), self._pages_per_block, 1)
        parts = torch.where(pages < 0, pages, pages * self._parts + torch.arange(self._parts))
        return parts.flatten(1)


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(memory, np.uint8))
