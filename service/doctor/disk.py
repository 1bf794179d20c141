"""The disk: the state directory and its secret, room for the cold tier, what its file system can do, how fast it is."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tierkv.config import Config
from tierkv.core.build import cold_path, read_secret
from tierkv.errors import NotFound, StoreInUse, TierKVError
from tierkv.service.cluster.signing import secret_fingerprint
from tierkv.service.doctor.finding import Finding, fail, ok, warn
from tierkv.service.doctor.mounts import file_system
from tierkv.service.status import in_units
from tierkv.storage.cold.directory import looking_at

__all__ = ["check"]

_TEST_BYTES = 64 << 20
_PIECE = 1 << 20
_SLOW = 100e6
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre"})


def check(config: Config) -> Iterator[Finding]:
    """Check where the daemon writes."""
    if config.state_dir is None:
        yield warn("state", "there is no state_dir: nothing survives a restart", "set state_dir")
    else:
        yield from _state(config.state_dir)
    yield from _secret(config)
    if not config.cold.capacity:
        yield ok("cold", "no cold tier is configured")
        return
    if config.cold.path is not None or config.state_dir is not None:
        yield from _cold(cold_path(config), config.cold.capacity)


def _state(path: Path) -> Iterator[Finding]:
    if not path.exists():
        yield _creatable("state", path)
        return
    found = path.stat()
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield fail("state", f"{path} is not a directory this user can use", "choose another state_dir")
    elif found.st_uid != os.getuid():
        yield warn("state", f"{path} is another user's", f"chown it to the daemon's user (uid {os.getuid()})")
    elif found.st_mode & 0o077:
        yield warn("state", f"{path} is open to other users", f"chmod 700 {path}")
    else:
        yield ok("state", f"{path}")


def _secret(config: Config) -> Iterator[Finding]:
    if config.secret is not None:
        path = config.secret
    elif config.state_dir is not None and os.access(config.state_dir, os.X_OK):
        path = config.state_dir / "secret"
        if not path.exists():
            return
    else:
        return
    try:
        secret = read_secret(path)
    except TierKVError as error:
        yield fail("secret", error.message, error.remedy)
    else:
        told = f"whole, and for its owner only; {secret_fingerprint(secret)} at all nodes that share blocks"
        yield ok("secret", told)


def _cold(path: Path, capacity: int) -> Iterator[Finding]:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not path.exists():
        yield _creatable("cold", path)
    try:
        with looking_at(path) as segments:
            yield ok("cold", f"{path} is a store of {len(segments)} segments that nobody has open")
    except StoreInUse as error:
        yield ok("cold", error.message)
    except NotFound:
        if path.is_dir() and any(path.iterdir()):
            yield fail("cold", f"{path} is not empty and no cold store", "choose an empty directory")
    except TierKVError as error:
        yield fail("cold", error.message, error.remedy)
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        return
    yield _room(path, existing, capacity)
    kind = file_system(existing)
    if kind in _REMOTE:
        yield fail("file-system", f"{existing} is {kind}: LMDB's files must be on a local disk", "set cold.path")
    elif kind == "tmpfs":
        yield warn("file-system", f"{existing} is tmpfs: it is memory and does not survive a reboot", "set cold.path")
    else:
        yield ok("file-system", kind)
    yield from _try_out(existing)


def _creatable(check: str, path: Path) -> Finding:
    existing = next(folder for folder in path.parents if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return ok(check, f"{path} will be made")
    return fail(check, f"{path} cannot be made: {existing} is not a directory this user can write to", "choose another")


def _room(path: Path, existing: Path, capacity: int) -> Finding:
    found = os.statvfs(existing)
    own = 0
    for entry in path.glob("segment-*") if path.is_dir() else ():
        with contextlib.suppress(OSError):
            own += entry.stat().st_blocks * 512
    free = found.f_bavail * found.f_frsize
    told = f"{in_units(free)} free, the cold tier has {in_units(own)} and grows to {in_units(capacity)}"
    if capacity - own > free:
        return warn("disk-room", told, "it will stay smaller: lower cold.capacity, or free disk")
    return ok("disk-room", told)


def _try_out(directory: Path) -> Iterator[Finding]:
    """Write and read a file of some megabytes, and ask for what the cold tier relies on."""
    if os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize < 4 * _TEST_BYTES:
        yield warn("disk-speed", "too little room to measure", "free some disk")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".tierkv-doctor-") as file:
            descriptor = file.fileno()
            yield _allocate(descriptor)
            piece = os.urandom(_PIECE)
            write = _rate(lambda: _write(descriptor, piece))
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _rate(lambda: _read(descriptor))
            yield _direct(file.name)
    except OSError as error:
        yield fail("disk-speed", f"{directory}: {error.strerror}", "check the disk, or set cold.path")
        return
    told = f"writes {write / 1e6:,.0f} MB/s with sync, reads {read / 1e6:,.0f} MB/s"
    if min(write, read) < _SLOW:
        yield warn("disk-speed", told, "a faster disk, or no cold tier: recomputing may beat loading")
    else:
        yield ok("disk-speed", told)


def _allocate(descriptor: int) -> Finding:
    try:
        os.posix_fallocate(descriptor, 0, _TEST_BYTES)
    except OSError as error:
        return fail("allocation", f"space cannot be reserved: {error.strerror}", "use ext4, xfs, btrfs or zfs")
    if os.fstat(descriptor).st_blocks * 512 < _TEST_BYTES:
        return warn("allocation", "reserved space is not taken at once: a full disk shows late", "use ext4 or xfs")
    return ok("allocation", "space can be reserved")


def _direct(path: str) -> Finding:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return ok("direct-io", "not possible here; only benchmarks use it")
    return ok("direct-io", "possible")


def _write(descriptor: int, piece: bytes) -> None:
    for at in range(0, _TEST_BYTES, len(piece)):
        os.pwrite(descriptor, piece, at)
    os.fsync(descriptor)


def _read(descriptor: int) -> None:
    for at in range(0, _TEST_BYTES, _PIECE):
        os.pread(descriptor, _PIECE, at)


def _rate(work: Callable[[], None]) -> float:
    """Return bytes a second."""
    began = time.perf_counter()
    work()
    return _TEST_BYTES / (time.perf_counter() - began)
