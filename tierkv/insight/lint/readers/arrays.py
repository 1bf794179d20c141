"""Token ids from NumPy files, read a piece at a time: logs of any size.

`.npy`: two dimensions, one prompt a row, padded at its end with negative numbers. `.npz`: `tokens`, all prompts one
after the other, and `lengths`, how many each has.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import InvalidRequest
from tierkv.insight.lint.core.batch import Ints, Tokens

__all__ = ["read_arrays"]

_REMEDY = "save a 2-dimensional array of integers as .npy, or `tokens` and `lengths` as .npz"


def read_arrays(path: Path, name: str, batch_tokens: int) -> Iterator[tuple[Tokens, Ints]]:
    """Yield tokens and prompt lengths, about `batch_tokens` tokens at a time. Raises `InvalidRequest`."""
    try:
        if zipfile.is_zipfile(path):
            yield from _packed(path, name, batch_tokens)
        else:
            yield from _rows(path, name, batch_tokens)
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{name}: not a readable array: {error}", remedy=_REMEDY) from None


def _rows(path: Path, name: str, batch_tokens: int) -> Iterator[tuple[Tokens, Ints]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"{name}: {array.ndim} dimensions of {array.dtype}", remedy=_REMEDY)
    shape, dtype, offset = array.shape, array.dtype, array.offset
    del array
    rows = max(1, batch_tokens // max(1, shape[1]))
    # Plain reads, not the mapping: mapped pages of a huge file would count as this process's memory.
    with path.open("rb") as file:
        file.seek(offset)
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            part = np.fromfile(file, dtype, count * shape[1]).reshape(count, shape[1])
            if dtype.kind == "i" and bool((part < 0).any()):
                kept = part >= 0
                lengths = kept.sum(axis=1, dtype=np.int64)
                if bool((kept[:, 1:] > kept[:, :-1]).any()):
                    raise InvalidRequest(f"{name}: a negative token inside a prompt, near row {first}", remedy=_REMEDY)
                yield part[kept].astype(np.uint32), lengths
            else:
                yield part.reshape(-1).astype(np.uint32, copy=False), np.full(count, shape[1], np.int64)


def _packed(path: Path, name: str, batch_tokens: int) -> Iterator[tuple[Tokens, Ints]]:
    with zipfile.ZipFile(path) as archive:
        with archive.open("lengths.npy") as member:
            lengths = _array(member, name).astype(np.int64)
        with archive.open("tokens.npy") as member:
            size, dtype = _header(member, name)
            if int(lengths.sum()) != size or bool((lengths < 0).any()):
                raise InvalidRequest(
                    f"{name}: `lengths` add up to {lengths.sum()}, `tokens` has {size}", remedy=_REMEDY
                )
            ends = np.cumsum(lengths)
            first = 0
            while first < lengths.size:
                done = int(ends[first] - lengths[first])
                last = max(first + 1, int(np.searchsorted(ends, done + batch_tokens, side="right")))
                wanted = int(ends[last - 1]) - done
                data = np.frombuffer(member.read(wanted * dtype.itemsize), dtype)
                yield data.astype(np.uint32, copy=False), lengths[first:last]
                first = last


def _array(member: IO[bytes], name: str) -> NDArray[Any]:
    size, dtype = _header(member, name)
    return np.frombuffer(member.read(size * dtype.itemsize), dtype)


def _header(member: IO[bytes], name: str) -> tuple[int, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise InvalidRequest(f"{name}: {len(shape)} dimensions of {dtype}", remedy=_REMEDY)
    return int(shape[0]), dtype
