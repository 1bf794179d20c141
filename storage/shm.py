"""One shared-memory file: created and held by its owner, mapped by local clients.

    offset 0       magic (8 bytes), format version u32, header size u32, data size u64, generation u64, owner pid u64
    header size    data

All little-endian. The generation is random and not zero while the segment is served; a client that was told another
one talks to a successor of the daemon it knew, and one that sees it become zero has mapped memory nobody serves any
more. The owner holds an exclusive flock for as long as it lives, so a file whose lock is free was left by a killed
process and may be replaced. Only `mmap` is used: the resource tracker of `multiprocessing.shared_memory` would unlink
the file when any client exits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import weakref
from pathlib import Path
from typing import Self

from tierkv.errors import ForeignStore, InvalidRequest, StorageError, StorageFull, StoreInUse, Unavailable

__all__ = ["HEADER_BYTES", "MappedSegment", "SharedSegment"]

HEADER_BYTES = 4096
_MAGIC = b"TKVSHM\r\n"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ")
_GENERATION_AT = 24
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 64 << 20
"""mmap.madvise holds the GIL: populate in pieces so that other threads run in between."""


class SharedSegment:
    """A shared-memory file owned by this process. Creating one blocks while its pages are allocated.

    Parameters
    ----------
    path
        Where the file lies, normally in /dev/shm. A leftover of a killed owner is replaced.
    data_bytes
        Size of the data area in bytes. All of it is reserved and mapped before this returns.

    Raises
    ------
    StoreInUse
        A living process holds the file.
    StorageFull
        The file system has no room for it; nothing is left behind.
    ForeignStore
        The path names something that is not a tierkv segment of this user.
    StorageError
        The file cannot be created for another reason.
    """

    def __init__(self, path: str | os.PathLike[str], data_bytes: int) -> None:
        if data_bytes < 1:
            raise InvalidRequest(f"a shared segment cannot hold {data_bytes} bytes")
        self.path = Path(path)
        self.data_bytes = data_bytes
        self.data_offset = HEADER_BYTES
        self.generation = secrets.randbelow(2**64 - 1) + 1
        fd = _claim(self.path)
        # Also runs at interpreter exit, so that a caller who forgets close() leaves no file.
        self._release = weakref.finalize(self, _release, fd, self.path, os.getpid())
        try:
            os.fchmod(fd, 0o600)
            header = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, data_bytes, 0, os.getpid())
            os.pwrite(fd, header.ljust(HEADER_BYTES, b"\0"), 0)
            # Without reserved blocks a full tmpfs is a SIGBUS in whoever touches the next page.
            os.posix_fallocate(fd, 0, HEADER_BYTES + data_bytes)
            self._map = mmap.mmap(fd, HEADER_BYTES + data_bytes)
            _populate(self._map)
            os.pwrite(fd, self.generation.to_bytes(8, "little"), _GENERATION_AT)
        except OSError as error:
            self._release()
            raise _creation_error(self.path, data_bytes, error) from error
        self._data: memoryview | None = memoryview(self._map)[HEADER_BYTES:]

    @property
    def data(self) -> memoryview:
        """The data area, writable. Slices stay valid after `close`. Raises `Unavailable` once closed."""
        data = self._data
        if data is None:
            raise Unavailable(f"shared segment {self.path} is closed")
        return data

    def close(self) -> None:
        """Unlink the file, which frees its name. Memory goes when the last view of it does. Idempotent."""
        self._release()
        self._data = None
        _unmap(self._map)


class MappedSegment:
    """A segment of another process, mapped read-write by a client.

    The owner may end at any time: the memory stays valid until `close` but nobody serves it any more.

    Parameters
    ----------
    path
        Path of the owner's `SharedSegment`.
    generation
        The generation the owner announced; None accepts any.

    Raises
    ------
    Unavailable
        There is no such segment, it is not ready, or it belongs to another generation.
    InvalidRequest
        The file is not a segment, is of another format version, or is shorter than its header says.
    """

    def __init__(self, path: str | os.PathLike[str], *, generation: int | None = None) -> None:
        self.path = Path(path)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Unavailable(
                f"shared segment {self.path} cannot be opened: {error.strerror}",
                remedy="is the daemon running, on this machine and as the same user?",
            ) from error
        try:
            self.data_offset, self.data_bytes, self.generation = _read_header(fd, self.path)
            if generation is not None and generation != self.generation:
                raise Unavailable(
                    f"shared segment {self.path} belongs to another run of the daemon", remedy="connect again"
                )
            self._map = mmap.mmap(fd, self.data_offset + self.data_bytes)
        finally:
            os.close(fd)
        self._data: memoryview | None = memoryview(self._map)[self.data_offset :]

    @property
    def served(self) -> bool:
        """Whether the owner has neither closed the segment nor been replaced by a successor. Cheap."""
        return self._map[_GENERATION_AT : _GENERATION_AT + 8] != bytes(8)

    @property
    def data(self) -> memoryview:
        """The data area, writable. Slices stay valid after `close`. Raises `Unavailable` once closed."""
        data = self._data
        if data is None:
            raise Unavailable(f"shared segment {self.path} is closed")
        return data

    def close(self) -> None:
        """Drop the mapping; memory goes when the last view of it does. Idempotent."""
        self._data = None
        _unmap(self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _claim(path: Path) -> int:
    """Return a locked descriptor of an empty file at `path`, replacing what a killed owner left."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            kind = ForeignStore if error.errno in (errno.ELOOP, errno.EISDIR) else StorageError
            raise kind(
                f"shared segment {path} cannot be created: {error.strerror}", remedy="choose another segment path"
            ) from error
        try:
            if _lock_current(fd, path):
                if os.fstat(fd).st_size == 0:
                    return fd
                # Clients may still have it mapped: tell them, and make a new file, never a truncated one.
                os.pwrite(fd, bytes(8), _GENERATION_AT)
                os.unlink(path)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock_current(fd: int, path: Path) -> bool:
    """Lock a file that may be replaced; say whether it is still the one at `path`. Raises unless it is ours to take."""
    found = os.fstat(fd)
    head = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(found.st_mode) else b""
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and (not head or head.startswith(_MAGIC))
    if not ours:
        raise ForeignStore(
            f"{path} is not a tierkv segment of this user", remedy="choose another segment path, or remove it"
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _HEADER.unpack(head)[5] if len(head) == _HEADER.size else "unknown"
        raise StoreInUse(
            f"shared segment {path} is held by process {pid}",
            remedy="stop that process, or choose another segment path",
        ) from None
    try:
        return os.path.samestat(found, os.lstat(path))
    except FileNotFoundError:
        return False


def _release(fd: int, path: Path, owner: int) -> None:
    # A forked child shares the lock and inherits this finalizer: only the owner may unlink.
    if os.getpid() == owner:
        os.pwrite(fd, bytes(8), _GENERATION_AT)
        path.unlink(missing_ok=True)
    os.close(fd)


def _unmap(mapping: mmap.mmap) -> None:
    # While views are out the mapping stays; the last one's death closes it.
    with contextlib.suppress(BufferError):
        mapping.close()


def _populate(mapping: mmap.mmap) -> None:
    """Map every page now, so that no first touch faults in the data path."""
    for start in range(0, len(mapping), _POPULATE_STEP):
        length = min(_POPULATE_STEP, len(mapping) - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _touch(mapping, start, length)


def _touch(mapping: mmap.mmap, start: int, length: int) -> None:
    with memoryview(mapping) as view, view[start : start + length : mmap.PAGESIZE] as first_bytes:
        first_bytes[:] = first_bytes.tobytes()


def _read_header(fd: int, path: Path) -> tuple[int, int, int]:
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise InvalidRequest(f"{path} is not a tierkv shared segment", remedy="use the path the daemon announced")
    _, version, header_bytes, data_bytes, generation, _ = _HEADER.unpack(raw)
    if version != _VERSION:
        raise InvalidRequest(
            f"shared segment {path} has format version {version}, this client knows {_VERSION}",
            remedy="install the same tierkv version on both sides",
        )
    if generation == 0:
        raise Unavailable(f"shared segment {path} is still being created", remedy="retry")
    if os.fstat(fd).st_size < header_bytes + data_bytes:
        raise InvalidRequest(f"shared segment {path} is shorter than its header says", remedy="restart the daemon")
    return header_bytes, data_bytes, generation


def _creation_error(path: Path, data_bytes: int, error: OSError) -> StorageError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        return StorageError(f"shared segment {path} cannot be created: {error.strerror}")
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    return StorageFull(
        f"shared segment {path} needs {data_bytes >> 20} MiB, {path.parent} has {free >> 20} MiB free",
        remedy=f"configure a smaller capacity or enlarge {path.parent} (mount -o remount,size=...)",
    )
