"""LoRA adapters: telling their weights apart.

vLLM's block hashes hold an adapter's name and path, which say nothing once somebody trains it further in place. What
is missing is put into the chain here: a revision of the adapter's files. vLLM reads those whenever it likes, and again
after it has forgotten an adapter; so they are only trusted while nothing about them has changed since the engine began.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b

from tierkv.checkpoint import SAMPLE_BYTES, sample_offsets

__all__ = ["Adapters"]


class Adapters:
    """Revisions of adapters in this engine's life. Not for several threads."""

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._known: dict[tuple[object, ...], bytes] = {}

    def revision(self, path: str) -> bytes | None:
        """Return 32 bytes that change with the adapter's files; None: nobody can say which weights vLLM has read.

        That is so for a path that is no local directory, and for files that were made, moved or changed after this
        object was. Reads a sample of every file when it sees it for the first time, and their dates always.
        """
        try:
            found = [(entry.name, entry.stat()) for entry in sorted(os.scandir(path), key=lambda entry: entry.name)]
            changed = [status.st_ctime_ns for _, status in found]
            changed += [os.stat(path).st_ctime_ns, os.lstat(path).st_ctime_ns]
            if max(changed) >= self._began_ns:
                return None
            files = [(name, status.st_size) for name, status in found if os.path.isfile(os.path.join(path, name))]
            seen = (path, tuple(files), *changed)
            if seen not in self._known:
                self._known[seen] = _revision(path, files)
            return self._known[seen]
        except OSError:
            return None


def _revision(path: str, files: list[tuple[str, int]]) -> bytes:
    digest = blake2b(digest_size=32)
    for name, size in files:
        digest.update(f"{name}\x00{size}\x00".encode())
        with open(os.path.join(path, name), "rb", buffering=0) as file:
            for offset in sample_offsets(size):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()
