"""A cache that is never in the way: it does not raise for reasons of the cache, and it answers in time.

    cache = tierkv.connect("unix:///run/tierkv.sock", fail_open=True, extra_s=0.05)

Every failure is a miss: `lookup` finds nothing, `where` nobody, `acquire` pins nothing, `reserve` grants nothing,
`commit` accepts nothing, `read_into` returns False, a ticket is done, counts are 0, `stats` is empty. No call takes
longer than the time it was asked to wait and `extra_s`, whether the daemon is stopped, dead, stuck or something else
altogether; `flush` and `clear`, which are not an engine's calls, take `timeout_s` more. Out of reach is only the
look-up of a host's name: give an address, or a name in /etc/hosts. After three failures in a row the daemon is not
asked any more, see `tierkv.client.breaker`; warm blocks that are mapped are read all the same.

Still raised: `InvalidRequest` for arguments that are wrong whatever the daemon does (a negative time, an index outside
the chain or the lease). A lease that has ended by its `ttl_s` raises `LeaseLost` from `view` and `read_into`: wrong
bytes would be worse. An engine that copies while it holds the lease, and asks for a longer `ttl_s` than that takes,
needs no handler.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from tierkv.cache import Chain, Grant, Hit, Pinned, ReadLease, Ticket, WriteLease
from tierkv.client.breaker import Health
from tierkv.client.fallback import SafeReadLease, SafeTicket, SafeWriteLease
from tierkv.client.guard import Calls, GuardedTransport, check_seconds
from tierkv.client.remote import RemoteCache
from tierkv.connected import ConnectedCache, Where
from tierkv.errors import InvalidRequest
from tierkv.spec import KVSpec

__all__ = ["FailOpenCache"]

_PROBE_SHARE = 0.5  # of extra_s: what is left is for the request itself


class FailOpenCache(ConnectedCache):
    """One tenant's view of a daemon's cache, or of nothing while there is no daemon.

    Parameters
    ----------
    transport
        Owned by this object from now on.
    timeout_s
        Longest time for `flush` and `clear`, in seconds.
    extra_s
        Longest time of any other call beyond the waiting that it asks for, in seconds.
    on_device
        Blocks in a hot tier on a GPU are read there.

    Raises `InvalidRequest` for an `extra_s` that is not above 0.
    """

    def __init__(
        self, transport: GuardedTransport, timeout_s: float, extra_s: float, *, on_device: bool = False
    ) -> None:
        self._transport = transport
        self._cache = RemoteCache(transport, timeout_s, on_device=on_device)
        self._calls = Calls(transport, extra_s)
        self._timeout_s = timeout_s
        self._specs: dict[str, KVSpec] = {}

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        tenant: str | None,
        token: str | None,
        ca: str | os.PathLike[str] | None,
        timeout_s: float,
        extra_s: float,
        on_device: bool = False,
    ) -> FailOpenCache:
        """Connect, if there is a daemon. Raises `InvalidRequest` for arguments that cannot be."""
        check_seconds("extra_s", extra_s, zero=False)
        probe_s = _PROBE_SHARE * extra_s
        transport = GuardedTransport(url, tenant, timeout_s, token=token, ca=ca, probe_s=probe_s)
        cache = cls(transport, timeout_s, extra_s, on_device=on_device)
        cache._calls.make(cache._cache.check, None)
        return cache

    def until(self, deadline: float) -> AbstractContextManager[None]:
        """End what this thread asks inside by `deadline` (monotonic) as well."""
        return self._transport.until(deadline)

    def health(self) -> Health:
        """Say how the daemon has been doing. Asks nobody."""
        return self._transport.breaker.health()

    def register(self, spec: KVSpec) -> str:
        """As `Cache.register`; while there is no daemon, it is told when there is one."""
        self._specs[spec.namespace] = spec
        self._calls.make(lambda: self._cache.register(spec), "")
        return spec.namespace

    def lookup(self, chain: Chain, *, wait_s: float = 0.0) -> Hit:
        check_seconds("wait_s", wait_s)
        deadline = self._calls.deadline(wait_s)
        return self._calls.make_until(deadline, lambda: self._cache.lookup(chain, wait_s=wait_s), Hit(0, 0, ()))

    def where(self, chain: Chain, *, wait_s: float = 0.05) -> Where:
        check_seconds("wait_s", wait_s)
        deadline = self._calls.deadline(wait_s)
        nobody = Where(len(chain), ())
        return self._calls.make_until(deadline, lambda: self._cache.where(chain, wait_s=wait_s), nobody)

    def prefetch(self, chain: Chain, *, deadline_s: float = 60.0) -> Ticket:
        check_seconds("deadline_s", deadline_s)
        nothing = SafeTicket(self._calls, None)
        return self._calls.make(
            lambda: SafeTicket(self._calls, self._cache.prefetch(chain, deadline_s=deadline_s)), nothing
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
    ) -> ReadLease:
        """As `Cache.acquire`, with all blocks verified, and fetched where they travel as HTTP bodies."""
        check_seconds("wait_s", wait_s)
        check_seconds("ttl_s", ttl_s, zero=False)
        check_seconds("compute_s", compute_s)
        deadline = self._calls.deadline(wait_s)

        nothing = SafeReadLease(self._calls, None, missed_tokens=self._failed(chain), deadline=deadline)

        def ask() -> SafeReadLease:
            lease = self._cache.acquire(
                chain,
                wait_s=wait_s,
                ttl_s=ttl_s,
                max_blocks=max_blocks,
                compute_s=compute_s,
                prefill_tokens_per_s=prefill_tokens_per_s,
                session=session,
                groups=groups,
                handoff=handoff,
            )
            return SafeReadLease(self._calls, lease, missed_tokens=lease.missed_tokens, deadline=deadline)

        return self._calls.make_until(deadline, ask, nothing)

    def read_into(self, chain: Chain, index: int, out: memoryview, *, group: int = 0, wait_s: float = 0.0) -> bool:
        check_seconds("wait_s", wait_s)
        if not 0 <= index < len(chain):
            raise InvalidRequest(f"a chain of {len(chain)} blocks has no block {index}")
        return self._calls.make(
            lambda: self._cache.read_into(chain, index, out, group=group, wait_s=wait_s), False, wait_s=wait_s
        )

    def reserve(
        self,
        chain: Chain,
        *,
        start: int = 0,
        stop: int | None = None,
        wait_s: float = 1.0,
        ttl_s: float = 60.0,
        session: str = "",
    ) -> WriteLease:
        check_seconds("wait_s", wait_s)
        check_seconds("ttl_s", ttl_s, zero=False)
        end = len(chain) if stop is None else stop
        if not 0 <= start <= end <= len(chain):
            raise InvalidRequest(f"a chain of {len(chain)} blocks has no blocks [{start}, {end})")

        nothing = SafeWriteLease(self._calls, None, self._no_room(chain, start, end))

        def ask() -> SafeWriteLease:
            lease = self._cache.reserve(chain, start=start, stop=stop, wait_s=wait_s, ttl_s=ttl_s, session=session)
            return SafeWriteLease(self._calls, lease)

        return self._calls.make(ask, nothing, wait_s=wait_s)

    def pin(self, chain: Chain, ttl_s: float) -> Pinned:
        check_seconds("ttl_s", ttl_s, zero=False)
        return self._calls.make(lambda: self._cache.pin(chain, ttl_s), Pinned(0, 0))

    def unpin(self, chain: Chain) -> int:
        return self._calls.make(lambda: self._cache.unpin(chain), 0)

    def end_session(self, namespace: str, session: str) -> int:
        return self._calls.make(lambda: self._cache.end_session(namespace, session), 0)

    def pause_session(self, namespace: str, session: str, expected_s: float) -> int:
        check_seconds("expected_s", expected_s)
        return self._calls.make(lambda: self._cache.pause_session(namespace, session, expected_s), 0)

    def delete(self, chain: Chain) -> int:
        return self._calls.make(lambda: self._cache.delete(chain), 0)

    def clear(self, namespace: str) -> int:
        return self._calls.make(lambda: self._cache.clear(namespace), 0, wait_s=self._timeout_s)

    def flush(self) -> None:
        self._calls.make(self._cache.flush, None, wait_s=self._timeout_s)

    def stats(self) -> dict[str, Any]:
        return self._calls.make(self._cache.stats, {})

    def close(self) -> None:
        self._calls.make(self._cache.close, None)

    def _failed(self, chain: Chain) -> dict[str, int]:
        spec = self._specs.get(chain.namespace)
        return {"failed": len(chain) * spec.block_tokens} if spec is not None and len(chain) else {}

    def _no_room(self, chain: Chain, start: int, stop: int) -> tuple[Grant, ...]:
        spec = self._specs.get(chain.namespace)
        groups = range(1 if spec is None else len(spec.groups))
        return tuple(Grant(index, group, "no_room") for index in range(start, stop) for group in groups)
