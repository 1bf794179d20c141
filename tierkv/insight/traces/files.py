"""Where the daemon keeps its trace: files in a directory, for their owner only, bounded in size together."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tierkv.errors import StorageError

__all__ = ["TraceFiles"]

_PARTS = 8


class TraceFiles:
    """Appends lines to the newest of a few files, and removes the oldest when they are too large together.

    Not for several threads. Raises `StorageError` if the directory cannot be used.

    Parameters
    ----------
    directory
        Made if it is not there, open to this user only.
    most_bytes
        Of all files together; each grows to an eighth of it, or by what is written at once.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most = most_bytes
        self._descriptor = -1
        self._written = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(directory, error.strerror) from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _unusable(directory, "permission denied")

    def write(self, lines: bytes | bytearray) -> None:
        """Append whole lines. Blocks on the disk. Raises `OSError`; then some of the lines may be cut short."""
        if self._written and self._written + len(lines) > self._most // _PARTS:
            self.close()
        if self._descriptor < 0:
            self._begin()
        self._written += len(lines)
        view = memoryview(lines)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self) -> None:
        self._remove_oldest()
        name = f"trace-{time.time_ns():020d}.jsonl"
        self._descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = 0

    def _remove_oldest(self) -> None:
        """Leave room for one more file."""
        sizes = {path: path.stat().st_size for path in sorted(self._directory.glob("trace-*.jsonl"))}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._most - self._most // _PARTS:
                break
            path.unlink()
            total -= size


def _unusable(directory: Path, why: str | None) -> StorageError:
    return StorageError(f"insight.trace: cannot write to {directory}: {why}", remedy="choose another directory")
