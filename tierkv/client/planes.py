"""Where a remote lease's bytes are: in shared memory mapped from the daemon, or in HTTP bodies."""

from __future__ import annotations

import contextlib
import http.client
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from tierkv.cache import BlockRef, Grant, Written
from tierkv.client.transport import Transport
from tierkv.direct import DirectReader
from tierkv.errors import BodyMismatch, DeviceError, InvalidRequest, Unavailable
from tierkv.storage.device import DeviceBlock, open_device
from tierkv.storage.device_pool import DevicePool
from tierkv.storage.shm import MappedSegment
from tierkv.wire import FRAME_BYTES, FRAME_TYPE, MSGPACK_TYPE, Frame, encode, pack_frame, pack_written, unpack_frame

__all__ = ["Attachment", "BodyPlane", "Mapped", "SharedPlane"]

log = logging.getLogger(__name__)


_SLAB_BYTES = (
    16 << 20
)  # large pages are for large allocations only; without them touching memory costs more than a copy


class _LeaseCalls:
    """What both planes send as control messages."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def abort(self, lease_id: str) -> None:
        with contextlib.suppress(Unavailable):  # an end that cannot be told comes by deadline
            self._transport.call("POST", f"/v1/leases/{lease_id}/abort")

    def release(self, lease_id: str, corrupt: Sequence[tuple[int, int]]) -> None:
        with contextlib.suppress(Unavailable):
            self._transport.call("POST", f"/v1/leases/{lease_id}/release", {"corrupt": corrupt} if corrupt else None)

    def renew(self, lease_id: str, ttl_s: float) -> float:
        return float(self._transport.call("POST", f"/v1/leases/{lease_id}/renew", {"ttl_s": ttl_s})["ttl_s"])


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory tiers of one run of the daemon, by name; empty when it shares none with this process.

    Attributes
    ----------
    devices
        Those that lie on a device.
    """

    generation: str
    segments: Mapping[str, MappedSegment]
    direct: DirectReader | None = None
    devices: Mapping[str, DevicePool] = field(default_factory=dict)

    @property
    def readable(self) -> set[str]:
        """Names of the tiers whose blocks can be read in place."""
        return {*self.segments, *self.devices}

    @property
    def served(self) -> bool:
        """Whether the daemon still serves this memory."""
        return all(segment.served for segment in self.segments.values())


class Attachment:
    """The daemon's memory tiers mapped into this process; also one on a GPU, if they are read there (`on_device`). Safe
    to use from any thread."""

    def __init__(self, transport: Transport, *, on_device: bool = False) -> None:
        self._transport = transport
        self._on_device = on_device
        self._mapped: Mapped | None = None

    def mapped(self) -> Mapped:
        """Return what is mapped. Blocks on first use and after `forget`."""
        mapped = self._mapped
        if mapped is None:
            # Two threads may map at the same time: both mappings are good, one is dropped with its last lease.
            mapped = self._mapped = self._map()
        return mapped

    def forget(self, mapped: Mapped) -> None:
        """Map anew the next time; leases keep the mapping they were given under."""
        if self._mapped is mapped:
            self._mapped = None

    def close(self) -> None:
        """Drop the mappings; views handed out stay valid."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            for segment in mapped.segments.values():
                segment.close()
            for pool in mapped.devices.values():
                pool.close()

    def _map(self) -> Mapped:
        try:
            answer = self._transport.call("GET", "/v1/attach")
        except InvalidRequest:  # not the same user
            return Mapped(self._transport.call("GET", "/healthz").generation, {})
        segments: dict[str, MappedSegment] = {}
        direct: DirectReader | None = None
        for found in answer["segments"]:
            try:
                segment = MappedSegment(found["path"], generation=int(found["generation"], 16))
            except (Unavailable, InvalidRequest):  # in another mount namespace, or already replaced
                continue
            segments[found["tier"]] = segment
            if "directory" in found:
                at, length = found["directory"]
                direct = DirectReader(segment.data[:at], segment.data[at : at + length], answer["tenant_key"])
        pools = _attached(answer.get("device")) if self._on_device else {}
        return Mapped(str(answer["generation"]), segments, direct, pools)


class SharedPlane(_LeaseCalls):
    """Blocks in place, in the mapped tiers as they were when the lease was given."""

    def __init__(self, transport: Transport, mapped: Mapped) -> None:
        super().__init__(transport)
        self.generation = mapped.generation
        self._mapped = mapped

    def view(self, block: BlockRef | Grant) -> memoryview:
        pool = self._mapped.devices.get(block.tier)
        if pool is None:
            return self._mapped.segments[block.tier].data[block.offset : block.offset + block.length]
        copy = _memory(block.length)
        pool.copy_out([(block.offset, copy)])
        return copy

    def device_view(self, block: BlockRef) -> DeviceBlock | None:
        pool = self._mapped.devices.get(block.tier)
        return None if pool is None else pool.block(block.offset, block.length)

    def commit(self, lease_id: str, written: Sequence[Written]) -> int:
        message = {"blocks": pack_written(written)}
        return int(self._transport.call("POST", f"/v1/leases/{lease_id}/commit", message, once=True)["accepted"])


class BodyPlane(_LeaseCalls):
    """Blocks in this process's own memory, fetched and sent as frames: all of a lease's blocks in one request."""

    def __init__(
        self, transport: Transport, path: str, lease_id: str, blocks: Sequence[BlockRef] = (), granted_bytes: int = 0
    ) -> None:
        super().__init__(transport)
        self.generation = ""
        self._path = path
        self._lease_id = lease_id
        self._expected = {(ref.index, ref.group): ref for ref in blocks}
        self._granted_bytes = granted_bytes
        self._slab = memoryview(b"")
        self._cutting = Lock()
        self._bytes: dict[tuple[int, int], memoryview] = {}

    def view(self, block: BlockRef | Grant) -> memoryview:
        where = (block.index, block.group)
        if where not in self._bytes:
            if isinstance(block, BlockRef):
                try:
                    self._fetch()
                except Unavailable:  # cut short: what has arrived is good for those who want no more
                    if where not in self._bytes:
                        raise
            else:
                # setdefault: of two threads that ask at the same time both get the same memory.
                self._bytes.setdefault(where, self._room(block.length))
        return self._bytes[where]

    def device_view(self, block: BlockRef) -> DeviceBlock | None:
        return None

    def commit(self, lease_id: str, written: Sequence[Written]) -> int:
        parts: list[bytes | memoryview] = []
        for block in written:
            parts.append(pack_frame(Frame(block.index, block.group, block.length, block.checksum)))
            parts.append(self._bytes[block.index, block.group])
        path = f"{self._path}/blocks:put?lease={lease_id}"
        with self._transport.request("POST", path, parts, FRAME_TYPE, once=True) as response:
            response.read()
        for block in written:
            del self._bytes[block.index, block.group]
        return len(written)

    def _room(self, nbytes: int) -> memoryview:
        """Return memory for a block to be sent, cut from a slab that is freed with the last of its blocks."""
        with self._cutting:
            slab = self._slab
            if len(slab) < nbytes:
                slab = _memory(max(nbytes, min(self._granted_bytes, _SLAB_BYTES)))
                self._granted_bytes -= len(slab)
            self._slab = slab[nbytes:]
            return slab[:nbytes]

    def _fetch(self) -> None:
        missing = {where: ref for where, ref in self._expected.items() if where not in self._bytes}
        body = encode({"lease": self._lease_id, "blocks": list(missing)}, MSGPACK_TYPE)
        memory = _memory(sum(ref.length for ref in missing.values()))
        header = memoryview(bytearray(FRAME_BYTES))
        with self._transport.request("POST", f"{self._path}/blocks:get", [body], MSGPACK_TYPE) as response:
            while missing:
                _fill(response, header)
                frame = unpack_frame(header)
                ref = missing.pop((frame.index, frame.group), None)
                if ref is None or ref.length != frame.length:
                    raise BodyMismatch("the daemon sent a block that was not asked for")
                data, memory = memory[: frame.length], memory[frame.length :]
                _fill(response, data)
                self._bytes[frame.index, frame.group] = data
            if response.read(1):
                raise BodyMismatch("the daemon sent more than was asked for")


def _attached(found: Mapping[str, Any] | None) -> dict[str, DevicePool]:
    """Attach what the daemon has on a device; nothing where this process cannot: it reads from the warm tier then."""
    if found is None:
        return {}
    try:
        device = open_device(found["bus_id"])
        return {found["tier"]: DevicePool.attach(device, found["handle"], found["nbytes"])}
    except DeviceError as error:
        log.warning("blocks on the daemon's device are not read there: %s", error)
        return {}


def _memory(nbytes: int) -> memoryview:
    """Return bytes that nobody has filled yet: zeroing them first would take as long as receiving them."""
    return np.empty(nbytes, np.uint8).data


def _fill(response: http.client.HTTPResponse, target: memoryview) -> None:
    at = 0
    while at < len(target):
        got = response.readinto(target[at:])
        if not got:
            raise Unavailable(
                "the daemon cut its answer short", remedy="the lease may have ended or the daemon stopped; ask again"
            )
        at += got
