"""How to keep blocks in LMDB under a disk cap: what each layout writes in steady churn.

    python benchmarks/lmdb_layouts.py              three to five minutes
    python benchmarks/lmdb_layouts.py --quick      every cell, briefly: to see that it runs

Three layouts hold about the same bytes under the same cap and evict the oldest values, but one in eight was used again
and is worth keeping:

    one        one environment; each commit deletes the oldest values, as many as it must, but those worth keeping
    recreated  segments; from the oldest, values worth keeping are copied, then its file is deleted and a new one made
    recycled   the same, but the oldest is emptied with one drop(delete=False), and its file filled again

Plain lmdb calls without tierkv. Values are .6 to 1 of their nominal size, as coded blocks are. Each cell fills the cap,
churns until every byte was written over twice or its time for that is up, and then measures: the figure is the median
over chunks of an eighth of a segment, in GB/s of new values. So it leaves out what happens once a segment, little for
`recycled` (a millisecond) and more for `recreated`, and the moments when the kernel writes pages back. Readers copy
random values out of short read transactions; their speed follows the slash. Nothing is synced.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from threading import Condition, Event, Thread

import lmdb
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
CAP = 512 * MIB
SEGMENT = CAP // 4
CHUNK = SEGMENT // 8
VALUES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
BATCHES = (1, 8, 32)
READERS = 2
PAGE = 4096
SPARE = 1 * MIB  # of a segment, for trees and lists of free pages
RESERVE = SEGMENT // 512  # LMDB lists the pages that emptying a segment frees in adjacent pages, 8 bytes each
HELD = 0.8  # of the cap that one environment holds; segments do, of which one is empty or half full and one sparse
KEPT = 1 / 8  # of the values are worth keeping when their time has come


def pages(nbytes: int) -> int:
    """Return the bytes that a value takes in whole pages."""
    return -(-(nbytes + 16) // PAGE) * PAGE


def key(number: int) -> bytes:
    """Return the key of a value, ascending with its number."""
    return number.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Cell:
    layout: str
    writemap: bool
    value_bytes: int
    batch: int
    readers: int


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s of values written and read, and how many commits of one environment found it full."""

    written: float
    read: float
    full: int


class Environment:
    """One LMDB file and how many readers are inside it."""

    def __init__(self, path: Path, size: int, *, writemap: bool) -> None:
        self.path = path
        self.env = lmdb.open(
            str(path), map_size=size, subdir=False, writemap=writemap, sync=False, max_dbs=2, lib_version=0
        )
        if writemap:  # a map over a file with holes is a SIGBUS when the disk is full
            fd = os.open(path, os.O_RDWR)
            os.posix_fallocate(fd, 0, size)
            os.close(fd)
        self.db, self.reserve = (self.env.open_db(name) for name in (b"values", b"reserve"))
        self.readers = 0

    def remove(self) -> None:
        self.env.close()
        for file in (self.path, self.path.with_name(self.path.name + "-lock")):
            file.unlink()


class Layout(ABC):
    """Values by ascending number, the oldest evicted. `live` says where each is; readers enter by `reading`."""

    def __init__(self, directory: Path, *, writemap: bool) -> None:
        self.directory, self.writemap = directory, writemap
        self.live: dict[int, Environment] = {}
        self.changed = Condition()
        self.next_number = 0
        self.full = 0
        self.chance = random.Random(1)

    @abstractmethod
    def put(self, values: Sequence[memoryview]) -> int:
        """Write some of `values`, at least one, in one commit; return how many."""

    @abstractmethod
    def close(self) -> None:
        """Close and delete everything."""

    def read(self, number: int, out: memoryview) -> int:
        """Copy a value; return its bytes, 0 if it is gone."""
        with self.changed:
            at = self.live.get(number)
            if at is None:
                return 0
            at.readers += 1
        try:
            with at.env.begin(db=at.db, buffers=True) as txn:
                value = txn.get(key(number))
                if value is None:
                    return 0
                np.copyto(np.frombuffer(out, np.uint8)[: len(value)], np.frombuffer(value, np.uint8))
                return len(value)
        finally:
            with self.changed:
                at.readers -= 1
                self.changed.notify_all()

    def append(self, at: Environment, values: Sequence[memoryview], evicted: Sequence[int] = ()) -> None:
        first = self.next_number
        with at.env.begin(write=True, db=at.db) as txn:
            for number in evicted:
                txn.delete(key(number))
            for number, value in enumerate(values, first):
                txn.put(key(number), value, append=True)
        self.next_number += len(values)
        with self.changed:
            for number in evicted:
                self.live.pop(number, None)
            self.live.update((number, at) for number in range(first, self.next_number))


class One(Layout):
    """One environment of the cap's size."""

    def __init__(self, directory: Path, *, writemap: bool) -> None:
        super().__init__(directory, writemap=writemap)
        self.at = Environment(directory / "one.lmdb", CAP, writemap=writemap)
        self.sizes: deque[tuple[int, int]] = deque()
        self.held = 0

    def put(self, values: Sequence[memoryview]) -> int:
        needed = sum(pages(len(value)) for value in values)
        evicted = self.oldest(self.held + needed - int(CAP * HELD))
        while True:
            try:
                self.append(self.at, values, evicted)
            except lmdb.MapFullError:
                # Pages come free two commits after the one that deleted, and need not be adjacent.
                self.full += 1
                self.append(self.at, (), [*evicted, *self.oldest(needed)])
                self.append(self.at, ())
                evicted = []
            else:
                break
        start = self.next_number - len(values)
        self.sizes += ((start + index, pages(len(value))) for index, value in enumerate(values))
        self.held += needed
        return len(values)

    def oldest(self, nbytes: int) -> list[int]:
        """Take the oldest values of at least `nbytes` off the books, but not those worth keeping."""
        numbers = []
        while nbytes > 0 and self.sizes:
            number, size = self.sizes.popleft()
            if self.chance.random() < KEPT:
                self.sizes.append((number, size))
                continue
            numbers.append(number)
            nbytes -= size
            self.held -= size
        return numbers

    def close(self) -> None:
        self.at.remove()


class Segments(Layout):
    """Segments filled one after the other. Subclasses say how the oldest becomes an empty one."""

    def __init__(self, directory: Path, *, writemap: bool) -> None:
        super().__init__(directory, writemap=writemap)
        self.made = 0
        self.filled: deque[tuple[Environment, range]] = deque()
        self.spare: Environment | None = None
        self.begin(self.new())

    def new(self) -> Environment:
        self.made += 1
        return Environment(self.directory / f"{self.made}.lmdb", SEGMENT, writemap=self.writemap)

    def begin(self, segment: Environment) -> None:
        self.filling, self.room, self.first = segment, SEGMENT - SPARE, self.next_number

    def put(self, values: Sequence[memoryview]) -> int:
        if self.room < SEGMENT // 4 and self.spare is None and len(self.filled) == CAP // SEGMENT - 1:
            self.spare = self.emptied(self.carried())
        some = self.fill(values)
        if some:
            return some
        self.filled.append((self.filling, range(self.first, self.next_number)))
        spare, self.spare = self.spare, None
        self.begin(spare or self.new())
        return self.put(values)

    def fill(self, values: Sequence[memoryview]) -> int:
        """Write as many values as fit in one commit; return their number."""
        some, needed = 0, 0
        while some < len(values) and needed + pages(len(values[some])) <= self.room:
            needed += pages(len(values[some]))
            some += 1
        try:
            self.append(self.filling, values[:some])
        except lmdb.MapFullError:  # free pages need not be adjacent
            some, self.room = 0, 0
        self.room -= min(needed, self.room)
        return some

    def carried(self) -> Environment:
        """Copy what is worth keeping from the oldest segment; return it when its readers have left."""
        segment, numbers = self.filled.popleft()
        with segment.env.begin(db=segment.db, buffers=True) as txn:
            kept = [txn.get(key(number), default=memoryview(b"")) for number in numbers if self.chance.random() < KEPT]
            self.fill(kept)
        with self.changed:
            for number in numbers:
                del self.live[number]
            self.changed.wait_for(lambda: not segment.readers)
        return segment

    @abstractmethod
    def emptied(self, segment: Environment) -> Environment:
        """Return an empty segment in place of this one."""

    def close(self) -> None:
        for segment in (*(segment for segment, _ in self.filled), self.filling, self.spare):
            if segment is not None:
                segment.remove()


class Recreated(Segments):
    def emptied(self, segment: Environment) -> Environment:
        segment.remove()
        return self.new()


class Recycled(Segments):
    def new(self) -> Environment:
        made = super().new()
        self.fill_reserve(made)
        return made

    def fill_reserve(self, segment: Environment, nbytes: int = RESERVE) -> None:
        with segment.env.begin(write=True, db=segment.reserve) as txn:
            txn.put(b"reserve", bytes(nbytes))

    def emptied(self, segment: Environment) -> Environment:
        # LMDB reuses a page two transactions after the one that freed it: each small write here lets one pass.
        with segment.env.begin(write=True, db=segment.reserve) as txn:
            txn.delete(b"reserve")
        self.fill_reserve(segment, 0)
        with segment.env.begin(write=True) as txn:
            txn.drop(segment.db, delete=False)
        self.fill_reserve(segment, 0)
        self.fill_reserve(segment)
        return segment


LAYOUTS: dict[str, type[Layout]] = {"one": One, "recreated": Recreated, "recycled": Recycled}


@dataclass(slots=True)
class Reader:
    """A thread that reads random live values until it is stopped."""

    layout: Layout
    stop: Event
    seed: int
    nbytes: int = 0
    thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        chance = random.Random(self.seed)
        out = memoryview(bytearray(max(VALUES)))
        while not self.stop.is_set():
            newest = self.layout.next_number
            held = max(1, len(self.layout.live))
            self.nbytes += self.layout.read(newest - 1 - chance.randrange(held), out)


def measure(cell: Cell, seconds: float, directory: Path) -> Speed:
    """Fill, churn, measure for about `seconds`."""
    chance = random.Random(0)
    source = memoryview(np.random.default_rng(0).bytes(2 * max(VALUES)))
    layout = LAYOUTS[cell.layout](directory, writemap=cell.writemap)
    readers: list[Reader] = []
    stop = Event()
    pending: list[memoryview] = []

    def put(nbytes: int) -> int:
        done = 0
        while done < nbytes:
            while len(pending) < cell.batch:
                size = chance.randint(int(0.6 * cell.value_bytes), cell.value_bytes)
                start = chance.randrange(0, max(VALUES), 64)
                pending.append(source[start : start + size])
            some = layout.put(pending)
            done += sum(map(len, pending[:some]))
            del pending[:some]
        return done

    try:
        put(CAP)
        began = time.perf_counter()
        for _ in range(2 * CAP // SEGMENT):
            put(SEGMENT)
            if time.perf_counter() - began > seconds:
                break
        readers += (Reader(layout, stop, seed) for seed in range(cell.readers))
        speeds: list[float] = []
        began, read_before = time.perf_counter(), sum(reader.nbytes for reader in readers)
        while len(speeds) < 3 or time.perf_counter() - began < seconds:
            at = time.perf_counter()
            speeds.append(put(CHUNK) / (time.perf_counter() - at) / 1e9)
            if time.perf_counter() - began > 4 * seconds:
                break
        taken = time.perf_counter() - began
        read = sum(reader.nbytes for reader in readers) - read_before
        return Speed(median(speeds), read / taken / 1e9, layout.full)
    finally:
        stop.set()
        for reader in readers:
            reader.thread.join()
        layout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure LMDB layouts under churn.")
    parser.add_argument("--directory", type=Path, help="on the disk in question; 600 MiB are needed")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    options = parser.parse_args()
    seconds = 0.05 if options.quick else 0.5
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"GB/s written under a cap of {CAP // MIB} MiB, by size of value and puts per commit; readers: / read",
        caption=f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python "
        f"{platform.python_version()}, LMDB 0.9 through lmdb {lmdb.__version__}; * the one environment was found full",
    )
    for name in ("KiB", "puts", "writemap", "readers", *LAYOUTS):
        table.add_column(name, justify="right", no_wrap=True)
    console = Console()
    for value_bytes, batch, readers, writemap in product(VALUES, BATCHES, (0, READERS), (False, True)):
        found = []
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory(prefix="lmdb-layouts-", dir=options.directory) as directory:
                cell = Cell(layout, writemap, value_bytes, batch, readers)
                found.append(measure(cell, seconds, Path(directory)))
        cells = (
            f"{speed.written:.2f}" + (f" / {speed.read:.1f}" if readers else "") + ("*" if speed.full else "")
            for speed in found
        )
        table.add_row(str(value_bytes // KIB), str(batch), "yes" if writemap else "no", str(readers or "-"), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
