"""`Cache` through a daemon."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from tierkv.cache import Chain, Hit, Pinned, Ticket, TicketProgress
from tierkv.client.planes import Attachment, BodyPlane, SharedPlane
from tierkv.client.transport import Answer, Transport
from tierkv.connected import ConnectedCache, Where
from tierkv.direct import UseLog
from tierkv.errors import InvalidRequest, NotFound, TierKVError, Unavailable
from tierkv.handles import LeasedComputer, LeasedReader, LeasedWriter, LeaseHandle, Plane, read_leased, take_over
from tierkv.spec import KVSpec
from tierkv.wire import unpack_choice, unpack_grants, unpack_hit, unpack_progress, unpack_refs, unpack_where

if TYPE_CHECKING:
    from tierkv.insight.audit.result import AuditResult

__all__ = ["RemoteCache", "connect"]

L = TypeVar("L", LeasedReader, LeasedWriter, LeasedComputer)
_ENDS = {"acquire": "release", "reserve": "abort"}
_FLUSH_S = 3600.0
_CLEAR_S = 600.0


def connect(
    url: str,
    *,
    tenant: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout_s: float = 5.0,
    on_device: bool = False,
) -> RemoteCache:
    """See `tierkv.connect`."""
    cache = RemoteCache(Transport(url, tenant, timeout_s, token=token, ca=ca), timeout_s, on_device=on_device)
    cache.check()
    return cache


class RemoteCache(ConnectedCache):
    """One tenant's view of a daemon's cache. Reconnects, registers and maps again by itself when the daemon restarts.

    Parameters
    ----------
    timeout_s
        Longest time that `close` spends on leases that are still out, in seconds.
    on_device
        Blocks in a hot tier on a GPU are read there.
    """

    def __init__(self, transport: Transport, timeout_s: float, *, on_device: bool = False) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_device = on_device
        self._attachment = Attachment(transport, on_device=on_device)
        self._specs: dict[str, KVSpec] = {}
        self._uses = UseLog(self._report_uses)
        self._leases: dict[str, tuple[int, weakref.ref[LeasedReader | LeasedWriter | LeasedComputer]]] = {}

    def check(self) -> None:
        """Ask whether the daemon is there. Raises `Unavailable`."""
        self._transport.call("GET", "/healthz")
        if self._on_device and self._transport.local:
            self._attachment.mapped()  # opening a device takes a second, which no acquire has

    def register(self, spec: KVSpec) -> str:
        self._specs[spec.namespace] = spec  # first: what cannot be told now is told when it is needed
        return str(self._transport.call("PUT", "/v1/namespaces", spec.to_dict())["namespace"])

    def namespaces(self) -> list[dict[str, Any]]:
        """List what is registered with the daemon, as documented in docs/wire.md."""
        return list(self._transport.call("GET", "/v1/namespaces")["namespaces"])

    def lookup(self, chain: Chain, *, wait_s: float = 0.0) -> Hit:
        return unpack_hit(self._on_chain(chain, "lookup", {"wait_s": wait_s} if wait_s else {}))

    def where(self, chain: Chain, *, wait_s: float = 0.05) -> Where:
        return unpack_where(self._on_chain(chain, "where", {"wait_s": wait_s}, extra_s=wait_s))

    def prefetch(self, chain: Chain, *, deadline_s: float = 60.0) -> Ticket:
        return _RemoteTicket(
            self._transport, str(self._on_chain(chain, "prefetch", {"deadline_s": deadline_s})["ticket"])
        )

    def acquire(
        self,
        chain: Chain,
        *,
        wait_s: float = 10.0,
        ttl_s: float = 30.0,
        max_blocks: int | None = None,
        compute_s: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        session: str = "",
        groups: tuple[int, ...] | None = None,
        handoff: bool = False,
    ) -> LeasedReader:
        asked = time.monotonic()
        message = {
            "wait_s": None if wait_s == math.inf else wait_s,
            "ttl_s": ttl_s,
            "max_blocks": max_blocks,
            "compute_s": compute_s,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "session": session,
            "groups": groups,
            "handoff": handoff,
        }
        answer, plane = self._leased(chain, "acquire", message, wait_s)
        lease_id, refs = str(answer["lease"]), unpack_refs(answer["blocks"])
        plane = plane or BodyPlane(self._transport, _path(chain.namespace), lease_id, refs)
        compute = self._remember(LeasedComputer(plane, *answer["compute"])) if answer["compute"] else None
        lease = LeasedReader(
            plane,
            lease_id,
            refs,
            hit_blocks=answer["hit_blocks"],
            hit_tokens=answer["hit_tokens"],
            published_blocks=answer["published_blocks"],
            tokens_by_tier=answer["tokens_by_tier"],
            missed_tokens=answer["missed_tokens"],
            saved_s=answer["saved_s"],
            waited_s=answer["waited_s"],
            choice=unpack_choice(answer["choice"]),
            compute=compute,
            computed_elsewhere=answer["computed_elsewhere"],
            deadline=asked + answer["waited_s"] + answer["ttl_s"],
        )
        return self._remember(lease)

    def take_over(self, namespace: str, handle: LeaseHandle) -> LeasedReader:
        """Read under a lease that another process has acquired and handed over, and release it.

        A lease that is over by now is found out when its blocks are asked for. Raises `Unavailable`. Does not wait.
        """
        for _ in range(2 if handle.generation else 0):
            mapped = self._attachment.mapped()
            if mapped.generation != handle.generation:
                self._attachment.forget(mapped)  # this process may be the one that is behind
            elif {ref.tier for ref in handle.blocks} <= mapped.readable:
                return self._remember(take_over(SharedPlane(self._transport, mapped), handle))
        # Whether the lease still holds is the daemon's to say: what it sends is this process's own.
        plane = BodyPlane(self._transport, _path(namespace), handle.id, handle.blocks)
        return self._remember(take_over(plane, replace(handle, deadline=math.inf)))

    def read_into(self, chain: Chain, index: int, out: memoryview, *, group: int = 0, wait_s: float = 0.0) -> bool:
        mapped = self._attachment.mapped() if self._transport.local else None
        if mapped is not None and mapped.direct is not None and 0 <= index < len(chain):
            if not mapped.served:
                self._attachment.forget(mapped)
            elif mapped.direct.read_into(chain.hashes[index], group, out):
                self._uses.note(chain.namespace, group, chain.hashes[index])
                return True
        return read_leased(self, chain, index, out, group, wait_s)

    def reserve(
        self,
        chain: Chain,
        *,
        start: int = 0,
        stop: int | None = None,
        wait_s: float = 1.0,
        ttl_s: float = 60.0,
        session: str = "",
    ) -> LeasedWriter:
        asked = time.monotonic()
        message = {"start": start, "stop": stop, "wait_s": wait_s, "ttl_s": ttl_s, "session": session}
        answer, plane = self._leased(chain, "reserve", message, wait_s)
        lease_id, grants = str(answer["lease"]), unpack_grants(answer["grants"])
        granted_bytes = sum(grant.length for grant in grants if grant.state == "granted")
        lease = LeasedWriter(
            plane or BodyPlane(self._transport, _path(chain.namespace), lease_id, granted_bytes=granted_bytes),
            lease_id,
            grants,
            deadline=asked + answer["waited_s"] + answer["ttl_s"],
        )
        return self._remember(lease)

    def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        answer = self._on_chain(chain, "pin", {"ttl_s": ttl_s})
        return Pinned(int(answer["blocks"]), int(answer["nbytes"]))

    def unpin(self, chain: Chain) -> int:
        return int(self._on_chain(chain, "unpin", {})["blocks"])

    def end_session(self, namespace: str, session: str) -> int:
        return int(self._on_session(namespace, session, "end", {})["retired"])

    def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        return int(self._on_session(namespace, session, "pause", {"expected_s": expected_s})["held"])

    def delete(self, chain: Chain) -> int:
        if not chain.hashes:
            return 0
        path = f"{_path(chain.namespace)}/blocks/{chain.hashes[-1].hex()}"
        answer = self._registered(chain.namespace, lambda: self._transport.call("DELETE", path))
        return int(answer["removed"])

    def clear(self, namespace: str) -> int:
        path = f"/v1/namespaces/{quote(namespace, safe='')}"
        answer = self._registered(namespace, lambda: self._transport.call("DELETE", path, extra_s=_CLEAR_S))
        return int(answer["removed"])

    def flush(self) -> None:
        self._transport.call("POST", "/v1/flush", extra_s=_FLUSH_S)

    def stats(self) -> dict[str, Any]:
        return dict(self._transport.call("GET", "/v1/stats"))

    def insight(self, window_s: float | None = None) -> dict[str, Any]:
        """Why prompts were not cached, as documented in docs/insight.md: since the start, or in the last `window_s`."""
        path = "/v1/insight" if window_s is None else f"/v1/insight?window={math.ceil(window_s)}"
        return dict(self._transport.call("GET", path))

    def tell_audits(self, results: Sequence[AuditResult]) -> None:
        """Tell the daemon what audits found, at most 64 at once. Raises `InvalidRequest` for more."""
        told = {"audits": [result.to_dict() for result in results]}
        self._transport.call("POST", "/v1/insight/audits", told, once=True)

    def close(self) -> None:
        self._uses.flush()
        deadline = time.monotonic() + self._timeout_s
        for pid, reference in list(self._leases.values()):
            lease = reference()
            if lease is not None and pid == os.getpid() and time.monotonic() < deadline:
                lease.__exit__(None, None, None)
        self._attachment.close()
        self._transport.close()

    def _leased(self, chain: Chain, verb: str, message: dict[str, Any], wait_s: float) -> tuple[Answer, Plane | None]:
        """Ask for a lease; return the answer and the shared memory it points into, None for HTTP bodies."""
        if not wait_s >= 0:
            raise InvalidRequest(f"nobody can wait {wait_s} seconds", remedy="use 0 for no waiting")
        for _ in range(2):
            mapped = self._attachment.mapped() if self._transport.local else None
            tiers = None
            if mapped is not None and mapped.segments:
                tiers = list(mapped.readable if verb == "acquire" else mapped.segments)
            answer = self._on_chain(chain, verb, {**message, "tiers": tiers}, extra_s=wait_s, once=True)
            if mapped is None or mapped.generation == answer.generation:
                return answer, SharedPlane(self._transport, mapped) if mapped is not None and tiers else None
            # The daemon was restarted between attaching and answering: its offsets belong to memory not mapped here.
            self._attachment.forget(mapped)
            if tiers is None:
                return answer, None
            for lease_id in filter(None, (answer["lease"], (answer.get("compute") or [None])[0])):
                with contextlib.suppress(TierKVError):
                    self._transport.call("POST", f"/v1/leases/{lease_id}/{_ENDS[verb]}")
        raise Unavailable("the daemon restarts again and again", remedy="look at its log")

    def _on_chain(
        self, chain: Chain, verb: str, message: dict[str, Any], *, extra_s: float = 0.0, once: bool = False
    ) -> Answer:
        path, message = f"{_path(chain.namespace)}/{verb}", {"hashes": b"".join(chain.hashes), **message}
        return self._registered(
            chain.namespace, lambda: self._transport.call("POST", path, message, extra_s=extra_s, once=once)
        )

    def _on_session(self, namespace: str, session: str, verb: str, message: dict[str, Any]) -> Answer:
        path = f"{_path(namespace)}/sessions/{quote(session, safe='')}/{verb}"
        return self._registered(namespace, lambda: self._transport.call("POST", path, message))

    def _registered(self, namespace: str, call: Callable[[], Answer]) -> Answer:
        """Make a call, registering its namespace first if the daemon was restarted and does not know it yet."""
        try:
            return call()
        except NotFound:
            spec = self._specs.get(namespace)
            if spec is None:
                raise
            self.register(spec)
            return call()

    def _report_uses(self, namespace: str, group: int, hashes: Sequence[bytes]) -> None:
        with contextlib.suppress(TierKVError):  # recency is worth one try, and no failed read
            self._transport.call("POST", f"{_path(namespace)}/touch", {"hashes": b"".join(hashes), "group": group})

    def _remember(self, lease: L) -> L:
        """Keep a lease in mind for as long as its holder does, so that `close` can end it."""
        if lease.id:
            leases, lease_id = self._leases, lease.id
            leases[lease_id] = (os.getpid(), weakref.ref(lease, lambda _: leases.pop(lease_id, None)))
        return lease


class _RemoteTicket(Ticket):
    def __init__(self, transport: Transport, ticket_id: str) -> None:
        self.id = ticket_id
        self._transport = transport

    def progress(self) -> TicketProgress:
        return unpack_progress(self._transport.call("GET", f"/v1/tickets/{self.id}"))

    def wait(self, wait_s: float, *, groups: int | None = None) -> TicketProgress:
        message = {"wait_s": wait_s, "groups": groups}
        return unpack_progress(self._transport.call("POST", f"/v1/tickets/{self.id}/wait", message, extra_s=wait_s))

    def cancel(self) -> None:
        self._transport.call("DELETE", f"/v1/tickets/{self.id}")


def _path(namespace: str) -> str:
    return f"/v1/{quote(namespace, safe='')}"
