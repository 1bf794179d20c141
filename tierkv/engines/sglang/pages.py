"""SGLang's host pools seen as blocks: every page as ``(layers, planes, tokens, heads, head_dim)``, in place.

HiCache keeps pages in one of several memory layouts. A block has one order (NHD, see `tierkv.spec.BlockLayout`), so
pages are permuted on the way: as strides of a view, at no copy but the one there is anyway. KV that one layout wrote
is therefore found by another.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.errors import ConfigError, InvalidRequest
from tierkv.spec import DTYPE_BYTES, KVGroup

__all__ = ["HiCachePages"]

# What a page of each layout looks like: planes (K, V), layers, tokens, heads, dimension. MLA pages have no planes.
_MHA: Mapping[str, str] = {
    "layer_first": "plthd",
    "page_first": "ptlhd",
    "page_first_direct": "plthd",
    "page_head": "phtld",
}
_MLA: Mapping[str, str] = {"layer_first": "lthd", "page_first": "tlhd", "page_first_direct": "lthd"}
_BLOCK = "lpthd"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_REMEDY = "tierkv stores plain MHA and MLA pools in the layouts layer_first, page_first, page_first_direct or page_head"


class HiCachePages:
    """The pages of a host pool. It keeps no memory of its own.

    Parameters
    ----------
    pool
        An ``sglang.srt.mem_cache.pool_host.HostKVCache`` with K and V of one size (MHA), or latents (MLA).
    kv_dtype
        What the bytes are where the pool only says ``uint8``: fp8 in either format is kept so. A key of `DTYPE_BYTES`.

    Attributes
    ----------
    tokens
        Tokens per page.
    dtype
        Element type, a key of `tierkv.spec.DTYPE_BYTES`.
    group
        The pool's layers on this rank as a KV group.
    drafts
        Layers at the end of it that belong to a draft model.
    device_layout
        In which order the GPU keeps a page, as far as the pool says so: ``nhd`` is the one that blocks have.

    Raises
    ------
    ConfigError
        The pool's pages are laid out in a way that is not known here, or their element type is not.
    """

    def __init__(self, pool: Any, kv_dtype: str = "") -> None:
        self._pool = pool
        self.tokens = int(pool.page_size)
        self.dtype = _dtype(pool.dtype, kv_dtype)
        layers, latent = int(pool.layer_num), getattr(pool, "kv_cache_dim", None)
        axes = (_MHA if latent is None else _MLA).get(pool.layout)
        if axes is None:
            raise ConfigError(f"pages of a {_name(pool)} cannot be stored in layout {pool.layout!r}", remedy=_REMEDY)
        heads, width = (1, int(latent)) if latent is not None else (int(pool.head_num), int(pool.head_dim))
        sizes = {"p": 2, "l": layers, "t": self.tokens, "h": heads, "d": width}
        self._shape = tuple(sizes[axis] for axis in axes)
        self._order = tuple(axes.index(axis) for axis in _BLOCK if axis in axes)
        self._has_planes = "p" in axes
        self._bits = _BITS[DTYPE_BYTES[self.dtype]]
        first = int(getattr(pool, "start_layer", 0) or 0)
        self.group = KVGroup(tuple(range(first, first + layers)), "full" if latent is None else "mla", heads, width)
        self.drafts = layers - int(getattr(pool, "target_layer_num", layers))
        self.device_layout = _device_layout(pool)
        self._check()

    def page(self, index: int) -> NDArray[Any]:
        """Return the page that begins with token `index` of the pool: a writable view, as the bits of its elements."""
        return self._block(self._pool.get_data_page(index, flat=False))

    def of(self, flat: torch.Tensor) -> NDArray[Any]:
        """Return a flat copy of a page, as the pool makes them, in the order of a block: a view of it.

        Raises `InvalidRequest` when it is not a page of this pool.
        """
        if flat.numel() != prod(self._shape) or flat.dtype.itemsize != self._bits.itemsize or not flat.is_contiguous():
            raise InvalidRequest(
                f"{flat.numel()} elements of {flat.dtype} are not a flat page of {self._shape} of {self.dtype}"
            )
        return self._block(flat)

    def in_block(self, payload: memoryview) -> NDArray[Any]:
        """Return the bytes of a block in the shape of what `page` and `of` return."""
        shape = tuple(self._shape[at] for at in self._order)
        block = np.frombuffer(payload, dtype=_numpy(self._bits)).reshape(shape)
        return block if self._has_planes else np.expand_dims(block, 1)

    def _block(self, page: torch.Tensor) -> NDArray[Any]:
        found: NDArray[Any] = page.view(self._bits).view(self._shape).numpy().transpose(self._order)
        return found if self._has_planes else np.expand_dims(found, 1)

    def _check(self) -> None:
        """Refuse a pool whose pages are not what its layout says: another class may mean something else by it."""
        try:
            page, again = self._pool.get_data_page(0, flat=False), self._pool.get_data_page(0, flat=False)
            fits = page.numel() == prod(self._shape) and page.data_ptr() == again.data_ptr()
            self.page(0)
        except (NotImplementedError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"a {_name(self._pool)} does not show its pages: {error}", remedy=_REMEDY) from None
        if not fits:
            raise ConfigError(f"a {_name(self._pool)} has pages of {tuple(page.shape)}", remedy=_REMEDY)


def _dtype(found: torch.dtype, said: str) -> str:
    name = str(found).removeprefix("torch.").removesuffix("fn")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"KV of {name} cannot be stored", remedy=f"known are {', '.join(DTYPE_BYTES)}")
    if name != "uint8":
        if said not in ("", name):
            raise ConfigError(f"kv_dtype is {said!r}, and the pool holds {name}", remedy="leave kv_dtype out")
        return name
    if DTYPE_BYTES.get(said) != 1 or said == "uint8":
        raise ConfigError(
            "the pool holds quantised KV and does not say in which format",
            remedy='set "kv_dtype" in the extra config to float8_e4m3 or float8_e5m2, as --kv-cache-dtype has it',
        )
    return said


def _device_layout(pool: Any) -> str:
    for info in getattr(pool, "_buffer_infos", ())[:1]:
        layout = getattr(getattr(info, "buffers", None), "layout", None)
        return str(getattr(layout, "value", "nhd"))
    return "nhd"


def _numpy(bits: torch.dtype) -> str:
    return str(bits).removeprefix("torch.")


def _name(pool: Any) -> str:
    return type(pool).__name__
