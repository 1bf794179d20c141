"""What the axes of an engine's paged caches are, told from their shape and what the KV group is known to hold.

    [2, pages, tokens, heads, dim]      K and V first
    [pages, 2, tokens, heads, dim]      K and V inside each page
    [pages, heads, tokens, 2 * dim]     K beside V
    [pages, tokens, latent]             MLA, also as [pages, 1, tokens, latent]

Strides are free, so that pages that lie with heads before tokens, or with layers inside of pages, are among these. What
fits none of them, or two, is refused: bytes of the wrong page would look as good as any others to all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierkv.errors import SpecMismatch
from tierkv.kernels.paged_caches import CacheLayout, PagedCaches
from tierkv.spec import DTYPE_BYTES, KVSpec

__all__ = ["known_pages"]


def known_pages(caches: Sequence[torch.Tensor], spec: KVSpec, group: int, page_tokens: int) -> tuple[PagedCaches, int]:
    """Recognise the caches of a KV group.

    Parameters
    ----------
    caches
        One tensor per layer, in the order of the spec's layers; all of one shape.
    spec, group
        What they hold.
    page_tokens
        Tokens of one of the engine's pages; divides the spec's block.

    Returns
    -------
    tuple
        The caches, and into how many equal parts each of the engine's pages is cut: page p is pages ``p * parts`` to
        ``(p + 1) * parts - 1`` of them.

    Raises
    ------
    SpecMismatch
        They do not hold that, or their shape can be read in two ways.
    """
    known = spec.groups[group]
    planes = 1 if known.kind == "mla" else 2
    shape, dtype = tuple(caches[0].shape), caches[0].dtype
    found = _layouts(shape, planes, known.kv_heads, known.head_dim)
    if len(found) != 1 or len(caches) != len(known.layers) or dtype.itemsize != DTYPE_BYTES[spec.dtype]:
        raise _unknown(
            f"{len(caches)} caches of shape {shape} and {dtype} "
            + ("can be read in two ways" if len(found) > 1 else "are not those")
            + f" of {len(known.layers)} layers with {planes} x {known.kv_heads} heads of {known.head_dim} {spec.dtype}"
        )
    layout = found[0]
    if layout == "PND" and len(shape) == 4:
        caches = [cache.squeeze(1) for cache in caches]
    try:
        pages = PagedCaches.of(caches, layout)
    except ValueError as error:
        raise _unknown(str(error)) from None
    parts, rest = divmod(page_tokens, pages.page_tokens)
    if rest or not parts or pages.num_pages % parts or spec.block_tokens % page_tokens:
        raise _unknown(
            f"{pages.num_pages} pages of {pages.page_tokens} tokens are no pages of {page_tokens}, "
            f"in blocks of {spec.block_tokens}"
        )
    if not pages.disjoint:
        raise _unknown("an engine's caches overlap in memory")
    return pages, parts


def _layouts(shape: tuple[int, ...], planes: int, heads: int, dim: int) -> list[CacheLayout]:
    """Return all layouts that a shape may have."""
    if planes == 1:
        return ["PND"] if len(shape) in (3, 4) and shape[-1] == dim and (len(shape) == 3 or shape[1] == 1) else []
    if len(shape) == 4:
        return ["PHN2D"] if (shape[1], shape[3]) == (heads, 2 * dim) else []
    if len(shape) != 5 or shape[3:] != (heads, dim):
        return []
    both: list[tuple[CacheLayout, int]] = [("2PNHD", shape[0]), ("P2NHD", shape[1])]
    return [layout for layout, count in both if count == 2]


def _unknown(message: str) -> SpecMismatch:
    return SpecMismatch(
        message, remedy="report the model and the engine's version: its pages have a layout that tierkv does not know"
    )
