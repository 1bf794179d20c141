"""Small files of a state directory that are replaced whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["replace_private"]


def replace_private(path: Path, data: bytes) -> None:
    """Put a file of mode 0600 in place of what was there, which stays whole until then. Blocks. Raises `OSError`."""
    beside = path.with_name(path.name + ".new")
    # Nobody else has this name; what a crash left of it is overwritten.
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
