"""Memory: is there room for the memory tiers, may it be locked, what did killed daemons leave there; open files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tierkv.config import Config
from tierkv.service.doctor.finding import Finding, fail, ok, warn
from tierkv.service.doctor.mounts import file_system
from tierkv.service.status import in_units

__all__ = ["check"]

_FILES = 4096
_SHOWN = 3
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check(config: Config) -> Iterator[Finding]:
    """Check memory and the limits of this process."""
    wanted = config.warm.capacity + (config.hot.capacity if config.hot.device == "cpu" else 0)
    yield from _directory(config.warm.directory, wanted)
    yield from _machine(wanted)
    yield _lockable(config)
    yield from _leftovers(config.warm.directory)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        yield warn("open-files", f"at most {soft} files: one a connection", f"ulimit -n {_FILES}, or LimitNOFILE=")
    else:
        yield ok("open-files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _directory(path: Path, wanted: int) -> Iterator[Finding]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield fail("shared-memory", f"{path}: {error.strerror}", "set warm.directory to a tmpfs, such as /dev/shm")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield fail("shared-memory", f"{path} cannot be written to", "give this user the right, or set warm.directory")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    told = f"{path} has {in_units(free)} free of {in_units(size)}, the memory tiers take {in_units(wanted)}"
    enlarge = f"mount -o remount,size=... {path} (docker run --shm-size=...), or lower warm.capacity"
    if wanted > size:
        yield fail("shared-memory", told, enlarge)
    elif wanted > free:
        yield warn("shared-memory", told, f"unless a running daemon holds the difference: {enlarge}")
    else:
        yield ok("shared-memory", told)
    kind = file_system(path)
    if kind != "tmpfs":
        yield warn("shared-memory-kind", f"{path} is {kind}, not memory", "set warm.directory to a tmpfs")


def _machine(wanted: int) -> Iterator[Finding]:
    available = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    told = f"{in_units(available)} available, the memory tiers take {in_units(wanted)}"
    if wanted > available:
        yield warn("memory", told, "lower warm.capacity, or the kernel may kill the daemon")
    else:
        yield ok("memory", told)
    with contextlib.suppress(OSError, ValueError):
        limit = int(_CGROUP_LIMIT.read_text())  # "max" where there is none
        told = f"this container may use {in_units(limit)}, shared memory counts"
        if wanted > limit:
            yield fail("container-memory", told, "raise the container's memory limit, or lower warm.capacity")
        else:
            yield ok("container-memory", told)


def _lockable(config: Config) -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "no limit" if soft == resource.RLIM_INFINITY else f"at most {in_units(soft)}"
    needed = config.hot.capacity and config.hot.device != "cpu"
    if needed and soft != resource.RLIM_INFINITY and soft < config.warm.capacity:
        return warn(
            "locked-memory",
            f"{told}: the warm tier may not be registered for copies to and from the GPU",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity, docker run --ulimit memlock=-1",
        )
    return ok("locked-memory", told)


def _leftovers(directory: Path) -> Iterator[Finding]:
    left: dict[str, int] = {}
    for path in directory.glob(f"tierkv-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                left[path.name] = os.fstat(descriptor).st_blocks * 512
            finally:
                os.close(descriptor)
    if left:
        names = ", ".join(sorted(left)[:_SHOWN]) + (" ..." if len(left) > _SHOWN else "")
        told = f"killed daemons left {in_units(sum(left.values()))} in {directory}: {names}"
        yield warn("leftovers", told, "start them again with the same state_dir, or remove these files")
    else:
        yield ok("leftovers", "none")
