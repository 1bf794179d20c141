"""What the scheduler's side tells the workers with each step."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.handles import LeaseHandle

__all__ = ["LoadOrder", "SaveOrder", "Step"]

Pages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Blocks to copy into a request's pages.

    Attributes
    ----------
    request_id
        Reported when the pages are filled, or when they will not be.
    epoch
        See `tierkv.engines.vllm.identity.Named.of`.
    leases
        Per rank the lease under which its blocks are read; each worker takes over its own and ends it.
    first_page
        Position of the first page to fill, counted from the prompt's begin.
    pages
        Per KV group the numbers of the pages to fill, from `first_page` on; below 0: not needed.
    """

    request_id: str
    epoch: str
    leases: tuple[LeaseHandle, ...]
    first_page: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks that are complete after this step.

    Attributes
    ----------
    epoch
        See `tierkv.engines.vllm.identity.Named.of`.
    hashes
        vLLM's hashes of the prompt's blocks up to the last one to save.
    start
        Index of the first block to save.
    pages
        Per KV group the numbers of these blocks' pages.
    """

    epoch: str
    hashes: tuple[bytes, ...]
    start: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Step:
    """Everything there is to do in a step; `idle` if the model has nothing to do in it."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    idle: bool = False
