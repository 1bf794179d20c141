"""`SharedStore`: blocks that several nodes share through an engine that is there already."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from tierkv.errors import ConfigError, InvalidRequest, StorageError
from tierkv.storage.codecs import codec_by_name
from tierkv.storage.shared.areas import Area
from tierkv.storage.shared.backend import Backend, Capacity
from tierkv.storage.shared.generation import Change
from tierkv.storage.shared.health import Health, Limits
from tierkv.storage.shared.known import Known, load, save
from tierkv.storage.shared.link import Link
from tierkv.storage.shared.naming import area_name, check_prefix
from tierkv.storage.shared.tier import SharedTier

__all__ = ["SharedStore"]

_LOOK_EVERY_S = 10.0


class SharedStore:
    """Blocks of many tenants and namespaces in one backend. Safe to use from any thread.

    Parameters
    ----------
    backend
        Where they are. The store opens and closes it.
    prefix
        What all its names in the backend begin with: stores with different ones do not see each other.
    codec
        Codec for new blocks whose meta names none, see `tierkv.storage.codecs`.
    in_flight
        Transfers of blocks under way at once.
    probe_timeout_s, transfer_timeout_s
        Seconds for a call that moves no block, and for one that does. What takes longer raises `Unavailable`.
    encode_threads
        Threads that code and decode blocks; with one the calling thread does it.
    hedge_s
        Seconds after which a read that has not been answered is asked a second time; None: never.
    known
        File in which to keep what this node knows, in a directory that exists; None: nothing is kept, and a clear
        while the node is down is not told of. Belongs beside whatever else of the blocks survives a restart.
    node_id
        Who this node is in claims; None: somebody new with every start.

    Raises
    ------
    ConfigError
        For settings that cannot be.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        prefix: str = "tierkv/1",
        codec: str = "bx1",
        in_flight: int = 8,
        probe_timeout_s: float = 0.2,
        transfer_timeout_s: float = 5.0,
        encode_threads: int = 1,
        hedge_s: float | None = None,
        known: Path | None = None,
        node_id: str | None = None,
    ) -> None:
        if encode_threads < 1:
            raise ConfigError("encode_threads must be at least 1")
        codec_by_name(codec)  # unknown ones are refused here, not at the first put
        self._prefix = check_prefix(prefix)
        self._codec = codec
        self._link = Link(backend, Limits(in_flight, probe_timeout_s, transfer_timeout_s, hedge_s))
        self._coders = ThreadPoolExecutor(encode_threads, "tierkv-shared-code") if encode_threads > 1 else None
        self._file = known
        self._node_id = node_id or secrets.token_hex(16)
        self._lock = Lock()
        self._saving = Lock()
        self._areas: dict[str, Area] = {}
        self._tiers: dict[str, SharedTier] = {}
        self._unsaved = False
        self._looked_at = 0.0

    def open(self) -> None:
        """Begin to connect, and go on in the background. Blocks for the first try, a few seconds at most.

        An engine that is not there is no error: until it is, every call raises `Unavailable` at once. Raises
        `ConfigError` when a client library is missing, and `StorageError` when `known` cannot be read.
        """
        if self._file is not None:
            for area in load(self._file):
                self._area(area)
        self._link.open()

    def close(self) -> None:
        """End what is under way, save what is known and close connections. Idempotent."""
        self._link.close()
        if self._coders is not None:
            self._coders.shutdown()
        for area in self._each_area():
            area.confirm()
        self._save()

    def area(self, tenant: bytes, namespace: bytes) -> SharedTier:
        """Return the tier of one tenant's blocks of one namespace; `BlockMeta` says what these are. Cheap."""
        if len(tenant) != 8 or len(namespace) != 32:
            raise InvalidRequest(
                f"an area has a tenant of 8 and a namespace of 32 bytes, not {len(tenant)} and {len(namespace)}"
            )
        area = self._area(Known(tenant, namespace))
        with self._lock:
            if area.name not in self._tiers:
                self._tiers[area.name] = SharedTier(
                    self._link, area, codec=self._codec, coders=self._coders, owner=self._node_id
                )
            return self._tiers[area.name]

    def poll(self) -> list[Change]:
        """Ask what other nodes did to the areas this one knows, and mend what the backend lost. Blocks.

        To be called regularly: what it returned counts as seen to with the next call, or `close`. Raises `Unavailable`
        and `StorageError`; what was found out until then is told next time.
        """
        areas = self._each_area()
        try:
            found = self._link.get_small([area.document_name for area in areas])
            for area, document in zip(areas, found, strict=True):
                area.absorb(document)
            if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
                self._link.look()
                self._looked_at = time.monotonic()
            changes = [change for area in areas if (change := area.take_change()) is not None]
        finally:
            self._save()
        return changes

    def check(self) -> Capacity:
        """Ask the engine how it is. One round trip, which raises what is wrong. Blocks."""
        return self._link.look()

    @property
    def available(self) -> bool:
        """Whether the engine is asked at all now: it has been reached, and has not just failed. Cheap."""
        return self._link.available

    @property
    def health(self) -> Health:
        return self._link.health()

    def describe(self) -> dict[str, Any]:
        """Report what there is to know without asking anybody, as plain data."""
        capacity = self._link.capacity
        return {
            "kind": self._link.backend.kind,
            **asdict(self.health),
            "capacity_bytes": capacity.capacity_bytes,
            "used_bytes": capacity.used_bytes,
            "warnings": list(capacity.warnings),
            "areas": len(self._areas),
            "damage": self._damage(),
        }

    def _damage(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        with self._lock:
            tiers = list(self._tiers.values())
        for tier in tiers:
            for cause, count in tier.damage.items():
                counts[cause] = counts.get(cause, 0) + count
        return counts

    def _area(self, remembered: Known) -> Area:
        name = area_name(self._prefix, remembered.tenant, remembered.namespace)
        with self._lock:
            if name not in self._areas:
                self._areas[name] = Area(self._link, name, remembered, on_change=self._changed, save=self._save)
            return self._areas[name]

    def _each_area(self) -> Sequence[Area]:
        with self._lock:
            return list(self._areas.values())

    def _changed(self) -> None:
        self._unsaved = True

    def _save(self) -> None:
        if self._file is None:
            return
        with self._saving:
            if self._unsaved:
                self._unsaved = False
                try:
                    save(self._file, [area.known() for area in self._each_area()])
                except StorageError:
                    self._unsaved = True
                    raise
