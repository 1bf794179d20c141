"""Python, packages, the GPU and what drives it, the clock."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tierkv.config import Config
from tierkv.errors import DeviceError
from tierkv.service.doctor.finding import Finding, fail, ok, warn
from tierkv.storage.device import open_device

__all__ = ["check", "in_range"]

_DISTRIBUTION = "tierkv-cache"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[.*?\])?(?P<bounds>[^;]*)(?P<marker>;.*)?")
_BOUND = re.compile(r"(?P<sign>>=|<=|<|>|==)\s*(?P<version>[\d.]+)")
_DRIVER = Path("/proc/driver/nvidia/version")
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 256  # struct timex has 208


def check(config: Config) -> Iterator[Finding]:
    """Check what is installed."""
    yield ok("python", sys.version.split()[0])
    yield _packages()
    yield from _gpu(config)
    yield from _clocks(bool(config.cluster.peers))


def in_range(version: str, bounds: str) -> bool:
    """Say whether a version is within bounds such as ``>=3.10,<4``. Only the numbers of a release are compared."""
    for bound in _BOUND.finditer(bounds):
        difference = _compare(_numbers(version), _numbers(bound["version"]))
        wanted = {">=": difference >= 0, "<=": difference <= 0, "<": difference < 0, ">": difference > 0}
        if not wanted.get(bound["sign"], difference == 0):
            return False
    return True


def _packages() -> Finding:
    remedy = f"pip install --upgrade {_DISTRIBUTION}"
    try:
        required = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return warn("packages", f"{_DISTRIBUTION} is not installed: its requirements are not known", remedy)
    wrong = []
    for requirement in required:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or "extra" in (match["marker"] or ""):
            continue
        found = _installed(match["name"])
        if not found:
            wrong.append(f"{match['name']} is missing")
        elif not in_range(found, match["bounds"]):
            wrong.append(f"{match['name']} is {found}, not {match['bounds'].strip()}")
    return fail("packages", "; ".join(wrong), remedy) if wrong else ok("packages", "all within their ranges")


def _gpu(config: Config) -> Iterator[Finding]:
    versions = {name: _installed(name) for name in ("torch", "triton")}
    versions["cupy"] = next((v for n in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (v := _installed(n))), "")
    told = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    driver = _DRIVER.exists()
    if not config.hot.capacity:
        yield ok("gpu", f"no hot tier is configured ({told}; {'a' if driver else 'no'} NVIDIA driver)")
        return
    if config.hot.device == "cpu" or (config.hot.device == "auto" and not driver):
        yield ok("gpu", f"the hot tier lies in ordinary memory ({told})")
        return
    yield from _device(config, told)
    missing = [name for name in ("torch", "triton") if not versions[name]]
    if missing:
        told = f"{' and '.join(missing)} missing: blocks are not verified again where they arrive on the GPU"
        yield warn("gpu-packages", told, f"pip install '{_DISTRIBUTION}[gpu]'")


def _device(config: Config, told: str) -> Iterator[Finding]:
    try:
        device = open_device("cuda" if config.hot.device == "auto" else config.hot.device)
        memory = device.memory()
    except DeviceError as error:
        yield fail("gpu", f"{error.message} ({told})", error.remedy)
        return
    free, total, wanted = memory.free_bytes >> 20, memory.total_bytes >> 20, config.hot.capacity >> 20
    yield ok("gpu", f"{device.name} at {device.bus_id}, {free} of {total} MiB free ({told})")
    if wanted > free:
        remedy = "lower hot.capacity, or leave the engine less memory"
        yield fail("gpu-memory", f"hot.capacity is {wanted} MiB, {device.name} has {free} MiB free", remedy)
    else:
        yield ok("gpu-memory", f"hot.capacity of {wanted} MiB fits")


def _clocks(among_others: bool) -> Iterator[Finding]:
    clock = time.get_clock_info("monotonic")
    if not clock.monotonic or clock.resolution > 1e-3:
        yield fail("clock", f"the monotonic clock steps by {clock.resolution} s", "leases need better than 1 ms")
    else:
        yield ok("clock", f"monotonic, {clock.implementation}")
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return
    if state == _UNSYNCHRONISED:
        dependent = "what nodes sign for each other, and the times" if among_others else "only the times"
        told = f"the wall clock is not synchronised: {dependent} of log lines depend on it"
        yield warn("wall-clock", told, "run chrony or systemd-timesyncd on the host")
    elif state >= 0:
        yield ok("wall-clock", "synchronised")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    release = re.match(r"[\d.]*", version)
    return [int(part) for part in release[0].split(".") if part] if release else []


def _compare(one: list[int], other: list[int]) -> int:
    length = max(len(one), len(other))
    padded = [numbers + [0] * (length - len(numbers)) for numbers in (one, other)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])
