"""Pins and breakpoints that outlive the daemon: a file of its state directory, and when it is read and written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tierkv.core.engine import Engine
from tierkv.core.pinning import SavedPin
from tierkv.errors import LimitExceeded, NotFound, SpecMismatch, StorageError
from tierkv.keys import HASH_BYTES, TENANT_NAME
from tierkv.spec import KVSpec
from tierkv.storage.private_file import replace_private

__all__ = ["PinFile", "keeping_pins"]

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_VERSION = 1


class PinFile:
    """The pins of one state directory, mode 0600.

    A pin is saved with the spec of its namespace, so that it can be placed again before anybody has registered that.

    Parameters
    ----------
    state_dir
        The daemon's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "pins.json"

    def read(self) -> tuple[list[KVSpec], list[SavedPin]]:
        """Return what was saved, nothing where there is no file. Reads a file. Raises `StorageError`."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']!r}")
            return [KVSpec.from_dict(spec) for spec in data["specs"]], [_pin(row) for row in data["pins"]]
        except Exception as error:  # whatever a damaged file leads to
            raise StorageError(f"{self.path} is damaged: {error or type(error).__name__}") from None

    def write(self, specs: Sequence[KVSpec], pins: Sequence[SavedPin]) -> None:
        """Replace the file, whole or not at all; without pins there is none. Raises `StorageError`."""
        data = {"version": _VERSION, "specs": [spec.to_dict() for spec in specs], "pins": [_row(pin) for pin in pins]}
        try:
            if not pins:
                self.path.unlink(missing_ok=True)
                return
            replace_private(self.path, json.dumps(data, separators=(",", ":")).encode())
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}", remedy="make room for it") from None


@contextlib.asynccontextmanager
async def keeping_pins(state_dir: Path | None, engine: Engine) -> AsyncIterator[None]:
    """Place the pins that were saved, then save what changes every five seconds, and at the end.

    A file that cannot be read is told of, and the daemon goes on without its pins.
    """
    if state_dir is None:
        yield
        return
    file = PinFile(state_dir)
    await asyncio.to_thread(_restore, file, engine)
    saved: list[SavedPin] | None = None

    async def save() -> None:
        nonlocal saved
        pins = engine.hints.saved()
        if pins == saved:
            return
        try:
            await asyncio.to_thread(file.write, _specs(engine, pins), pins)
            saved = pins
        except StorageError as error:
            log.warning("pins are not saved, and would not outlive a restart", extra={"detail": str(error)})

    async def work() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await save()

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await save()


def _restore(file: PinFile, engine: Engine) -> None:
    try:
        specs, pins = file.read()
    except StorageError as error:
        log.error("starting without the pins and breakpoints that were saved", extra={"detail": str(error)})
        return
    for spec in specs:
        with contextlib.suppress(LimitExceeded, SpecMismatch):  # their pins are not placed
            engine.register(spec)
    if pins:
        about = {"saved": len(pins), "placed": engine.hints.restore(pins)}
        log.info("pins and breakpoints of before the restart", extra=about)


def _specs(engine: Engine, pins: Sequence[SavedPin]) -> list[KVSpec]:
    specs = []
    for namespace in sorted({pin.namespace for pin in pins}):
        with contextlib.suppress(NotFound):
            specs.append(engine.namespace(namespace).spec)
    return specs


def _row(pin: SavedPin) -> dict[str, Any]:
    return {
        "tenant": pin.tenant,
        "namespace": pin.namespace,
        "hashes": b"".join(pin.hashes).hex(),
        "until": pin.until,
        "ttl_s": pin.ttl_s,
    }


def _pin(row: dict[str, Any]) -> SavedPin:
    data = bytes.fromhex(row["hashes"])
    hashes = tuple(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))
    tenant, until, ttl_s = str(row["tenant"]), float(row["until"]), float(row["ttl_s"])
    if not hashes or len(hashes[-1]) != HASH_BYTES:
        raise ValueError("not a chain of hashes")
    if not TENANT_NAME.fullmatch(tenant) or not 0 <= ttl_s < math.inf or not math.isfinite(until):
        raise ValueError("not a pin")
    return SavedPin(tenant, str(row["namespace"]), hashes, until, ttl_s)
