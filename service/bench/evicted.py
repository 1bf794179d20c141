"""The cold tier on the disk itself: random reads with the page cache evicted, beside plain and direct reads."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from tierkv.errors import StorageError
from tierkv.service.bench.measure import gbps, seconds
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.storage.cold import ColdTier

__all__ = ["EvictedRow", "measure_evicted", "resident_share"]

MIB = 1 << 20
_MOST_RESIDENT = 0.1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class EvictedRow:
    """Speeds in GB/s of random reads of whole blocks from the disk, codec raw.

    Attributes
    ----------
    block_bytes, total_bytes
        Size of a read, and of all reads of one round; each block is read once.
    start_reads
        Share of the store that a start on an evicted store brings into the page cache: index and readahead.
    resident
        Share of the store that was in the page cache when timed reading began, the most of all rounds.
    get_gbps, get2_gbps
        `ColdTier.read_into` by one thread and by two.
    pread_gbps, direct_gbps
        Reads of the same size from a file of the same size, through the page cache and around it (O_DIRECT; None
        where the file system has no such thing).
    """

    block_bytes: int
    total_bytes: int
    start_reads: float
    resident: float
    get_gbps: float
    get2_gbps: float
    pread_gbps: float
    direct_gbps: float | None


def measure_evicted(directory: Path, block_bytes: int, total_bytes: int, rounds: int) -> EvictedRow:
    """Write `total_bytes`, evict them, read them in random order. Blocks; takes twice `total_bytes` of disk.

    Raises `StorageError` where the file system cannot evict, as one in memory cannot.
    """
    number = total_bytes // block_bytes
    blocks = Blocks.make(block_bytes, max(1, 16 * MIB // block_bytes))
    keys = [fresh_key() for _ in range(number)]
    store = _Store(directory / "store", total_bytes)
    file = directory / "plain"
    with closing(store.open()) as tier, file.open("wb") as plain:
        for start in range(0, number, len(blocks.data)):
            some = keys[start : start + len(blocks.data)]
            for outcome in tier.put_many(blocks.items(some)):
                if outcome is not None:
                    raise outcome
            plain.write(blocks.data[: len(some)].data)
    generator = np.random.default_rng(0)
    times: dict[str, list[float]] = {"get": [], "get2": [], "pread": [], "direct": []}
    resident, start_reads = [], []
    with _aligned(2, block_bytes) as outs, ThreadPoolExecutor(2, "bench") as pool:
        for _ in range(rounds):
            order = [int(index) for index in generator.permutation(number)]
            for threads, name in ((1, "get"), (2, "get2")):
                _evict(store.files())
                with closing(store.open()) as tier:
                    start_reads.append(resident_share(store.files()))
                    resident.append(_evict(store.files()))
                    work = partial(_read_store, tier, [keys[index] for index in order], outs[:threads], pool)
                    times[name].append(seconds(work))
            for flags, name in ((0, "pread"), (os.O_DIRECT, "direct")):
                _evict([file])
                times[name] += _read_file(file, flags, order, outs[0])
    speed = {name: gbps(number * block_bytes, median(taken)) for name, taken in times.items() if taken}
    return EvictedRow(
        block_bytes,
        number * block_bytes,
        median(start_reads),
        max(resident),
        speed["get"],
        speed["get2"],
        speed["pread"],
        speed.get("direct"),
    )


def resident_share(paths: Iterable[Path]) -> float:
    """Return which share of some files' bytes is in the page cache. Raises `StorageError` when nobody can tell."""
    pages = found = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)
            )
            del view
            if failed:
                raise StorageError(f"mincore fails on {path}: {os.strerror(ctypes.get_errno())}")
        pages += flags.size
        found += int(np.count_nonzero(flags & 1))
    return found / max(pages, 1)


class _Store:
    def __init__(self, path: Path, payload_bytes: int) -> None:
        self._path = path
        self._capacity = payload_bytes + payload_bytes // 4 + 64 * MIB

    def open(self) -> ColdTier:
        return ColdTier(
            self._path,
            capacity_bytes=self._capacity,
            segment_bytes=max(self._capacity // 16, 16 * MIB),
            codec="raw",
            sync="none",
        )

    def files(self) -> list[Path]:
        return sorted(self._path.glob("*.lmdb"))


def _evict(paths: Sequence[Path]) -> float:
    """Take files out of the page cache; return the share that stays."""
    _unmap_pages(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = resident_share(paths)
    if share > _MOST_RESIDENT:
        raise StorageError(
            f"{share:.0%} of {paths[0].parent} stays in memory", remedy="name a --directory on a disk, not on tmpfs"
        )
    return share


def _unmap_pages(paths: Iterable[Path]) -> None:
    """Let go of the pages of files that this process maps, as LMDB does: mapped pages stay. The mappings remain."""
    names = {str(path.resolve()) for path in paths}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if fields[-1] in names:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _read_store(tier: ColdTier, keys: Sequence[bytes], outs: Sequence[memoryview], pool: ThreadPoolExecutor) -> None:
    """Read all blocks with one thread for each of `outs`."""

    def read(share: int) -> None:
        for key in keys[share :: len(outs)]:
            tier.read_into(key, outs[share])

    list(pool.map(read, range(len(outs))))


def _read_file(path: Path, flags: int, order: Sequence[int], out: memoryview) -> list[float]:
    """Return the seconds that reading all blocks took, nothing where the file system refuses `flags`."""
    try:
        fd = os.open(path, os.O_RDONLY | flags)
    except OSError:
        return []
    try:
        return [seconds(lambda: [os.preadv(fd, [out], index * len(out)) for index in order])]
    finally:
        os.close(fd)


@contextmanager
def _aligned(number: int, nbytes: int) -> Iterator[list[memoryview]]:
    """Lend buffers that begin on a page, as direct reads need them."""
    with mmap.mmap(-1, number * nbytes) as memory:
        whole = memoryview(memory)
        parts = [whole[start * nbytes :][:nbytes] for start in range(number)]
        try:
            yield parts
        finally:
            for part in (*parts, whole):
                part.release()
