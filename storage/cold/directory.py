"""The directory of a cold store: whose it is, who uses it, and what else lies in it.

tierkv-store.json      makes a directory ours; written once
tierkv-store.lock      locked (flock) while a process has the store open; holds its process id
segment-000001.lmdb    a segment; `-lock` beside it is LMDB's, `.unsynced` marks one that a power loss may have torn
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tierkv.errors import ForeignStore, NotFound, StorageError, StoreInUse

__all__ = ["StoreDirectory", "looking_at"]

_MARKER = "tierkv-store.json"
_LOCK = "tierkv-store.lock"
_FORMAT = "tierkv cold store"
_VERSION = 1
_SEGMENT = re.compile(r"segment-(\d{6,})\.lmdb")
_LEFTOVER = re.compile(r"segment-\d{6,}\.(new|new-lock)")
_COMPANION = re.compile(r"(segment-\d{6,})\.(unsynced|lmdb-lock)")


@contextmanager
def looking_at(path: Path) -> Iterator[list[Path]]:
    """Keep a store from being opened for use while its segment paths are looked at. Writes nothing.

    Raises `NotFound`, `ForeignStore` or `StoreInUse`, or `StorageError` for a directory that cannot be read.
    """
    try:
        if not (path / _MARKER).exists():
            raise NotFound(f"there is no cold store at {path}", remedy="name the directory that holds its " + _MARKER)
        _check_marker(path)
        lock = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC) if (path / _LOCK).exists() else -1
        try:
            if lock >= 0:
                _lock(lock, path, fcntl.LOCK_SH, "stop that process, or ask it: tierkv inspect URL")
            yield _segment_paths(path)
        finally:
            if lock >= 0:
                os.close(lock)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"the cold store {path} cannot be read: {error}", remedy="run this as its owner") from error


class StoreDirectory:
    """A claimed store directory; no other process can claim it until `release`.

    Parameters
    ----------
    path
        Created if missing.

    Raises
    ------
    ForeignStore
        The directory has content but no marker, or a marker of another format.
    StoreInUse
        Another process has it open.
    StorageError
        It cannot be created, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_strangers()
            self._claim()
            try:
                self._write_marker()
                self._sweep()
            except BaseException:
                self.release()
                raise
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"the cold store {path} cannot be used: {error}",
                remedy="give the cold tier a directory this user can write to",
            ) from error

    def segment_paths(self) -> list[Path]:
        """Return everything that is named like a segment, by number."""
        return _segment_paths(self.path)

    def new_segment_path(self, in_use: Iterable[Path]) -> Path:
        """Return the lowest name that no segment has, nor had one of those in use whose file was taken away."""
        taken = {*self.segment_paths(), *in_use}
        number = 1
        while (path := self.path / f"segment-{number:06}.lmdb") in taken:
            number += 1
        return path

    def strangers(self) -> list[Path]:
        """Return entries that are none of the store's own."""
        own = {_MARKER, _LOCK}
        return [
            entry
            for entry in sorted(self.path.iterdir())
            if entry.name not in own and not _SEGMENT.fullmatch(entry.name) and not _COMPANION.fullmatch(entry.name)
        ]

    def release(self) -> None:
        """Let another process claim the directory. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _refuse_strangers(self) -> None:
        try:
            _check_marker(self.path)
        except FileNotFoundError:
            if any(entry.name not in (_LOCK, _MARKER + ".new") for entry in self.path.iterdir()):
                raise ForeignStore(
                    f"{self.path} is not empty and not a tierkv cold store",
                    remedy=f"choose an empty directory; if it is a store, restore its {_MARKER}",
                ) from None

    def _claim(self) -> None:
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, self.path, fcntl.LOCK_EX, "stop that process, or give this one another directory")
        except StoreInUse:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def _write_marker(self) -> None:
        marker = self.path / _MARKER
        if marker.exists():
            return
        unfinished = marker.with_name(marker.name + ".new")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        with unfinished.open("w") as file:
            json.dump({"format": _FORMAT, "version": _VERSION, "created": created}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(marker)

    def _sweep(self) -> None:
        """Delete what a killed process left: unfinished segments, lock files and marks without a segment."""
        for entry in list(self.path.iterdir()):
            beside = _COMPANION.fullmatch(entry.name)
            orphaned = beside is not None and not (self.path / f"{beside[1]}.lmdb").exists()
            ours = orphaned or _LEFTOVER.fullmatch(entry.name) or entry.name == _MARKER + ".new"
            if ours and not entry.is_dir():
                entry.unlink()


def _segment_paths(path: Path) -> list[Path]:
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _SEGMENT.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found)]


def _check_marker(path: Path) -> None:
    """Raise `ForeignStore` for the marker of something else, `FileNotFoundError` where there is none."""
    try:
        marker = json.loads((path / _MARKER).read_bytes())
    except ValueError:
        marker = None
    if not isinstance(marker, dict) or (marker.get("format"), marker.get("version")) != (_FORMAT, _VERSION):
        raise ForeignStore(
            f"{path / _MARKER} is not the marker of a cold store this tierkv knows",
            remedy="use the tierkv version that made it, or another directory",
        )


def _lock(fd: int, path: Path, mode: int, remedy: str) -> None:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise StoreInUse(f"the cold store {path} is in use by process {holder}", remedy=remedy) from None
