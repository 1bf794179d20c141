"""Which file system a path lies on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["file_system"]


def file_system(path: Path) -> str:
    """Return its type, as in /proc/self/mounts."""
    best, kind = "", "unknown"
    resolved = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, found = line.split()[1:3]
        mount = mount.replace("\\040", " ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind
