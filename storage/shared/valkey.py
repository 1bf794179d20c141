"""Valkey or Redis, one server or a cluster, through valkey-glide."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tierkv.errors import ConfigError
from tierkv.storage.shared import diagnosis
from tierkv.storage.shared.backend import Backend, BackendError, Buffer, Capacity

if TYPE_CHECKING:
    from glide import GlideClient, GlideClusterClient

__all__ = ["ValkeyBackend"]

_SWAP = """
local found = redis.call('GET', KEYS[1])
if ARGV[1] == 'absent' then
    if found then return 0 end
elseif found ~= ARGV[2] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[3])
return 1
"""
_CLAIM = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_UNCLAIM = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
return 1
"""
_CONNECT_MS = 1000
_IN_FLIGHT = 100_000
"""More than the tier ever asks for at once, so that the client has no reason to refuse."""
_SCAN = 1000

_Kind = Literal["down", "full", "refused", "failed"]
_SIGNS: tuple[tuple[_Kind, tuple[str, ...]], ...] = (
    ("full", ("OOM ", "OUTOFMEMORY", "MAXMEMORY")),
    ("refused", ("NOAUTH", "WRONGPASS", "NOPERM", "PERMISSIONDENIED", "AUTHENTICATIONFAILED", "NO PERMISSIONS")),
    ("down", ("CONNECT", "BROKENPIPE", "TIMED OUT", "LOADING")),
    ("down", ("CLUSTERDOWN", "MASTERDOWN", "READONLY", "TRYAGAIN", "MOVED", "TOPOLOGY")),
)
_REMEDIES: dict[_Kind, str] = {
    "down": "check that the server runs and can be reached from here",
    "full": "raise maxmemory, or set maxmemory-policy to allkeys-lru",
    "refused": "check the user name, the password and what the user may do",
    "failed": "look into the server's log",
}


class ValkeyBackend(Backend):
    """Strings of a Valkey or Redis server, or of a cluster of them. Reconnects by itself.

    Parameters
    ----------
    addresses
        Host and port of the server, or of some nodes of the cluster.
    cluster
        Whether it is a cluster; None: ask.
    tls
        Encrypt, and verify the server's certificate.
    root_certificates
        PEM of the certificates to verify it by; None: those of the system.
    username, password
        Of the server's access control list; a password alone is that of the default user.
    database
        Which of a single server's databases.
    patience_s
        Seconds after which the client forgets a request that nobody waits for any more. Above every deadline of the
        tier, which is the one that decides.
    """

    kind: ClassVar[str] = "valkey"
    probe_width: ClassVar[int] = 256
    largest_value: ClassVar[int] = 512 << 20

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        cluster: bool | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        username: str | None = None,
        password: str | None = None,
        database: int = 0,
        patience_s: float = 60.0,
    ) -> None:
        if not addresses:
            raise ConfigError("a Valkey backend needs an address", remedy="give host and port of the server")
        if username and password is None:
            raise ConfigError("a Valkey user needs a password", remedy="give both, or neither")
        if cluster and database:
            raise ConfigError("a cluster has no databases but 0", remedy="leave the database out")
        self._addresses = tuple(addresses)
        self._cluster = cluster
        self._tls = tls
        self._root_certificates = root_certificates
        self._username = username
        self._password = password
        self._database = database
        self._patience_s = patience_s
        self._client: GlideClient | GlideClusterClient | None = None
        self._scripts: dict[str, Any] = {}

    async def open(self) -> None:
        self._glide = glide = _import_glide()
        glide.Logger.init(glide.LogLevel.OFF)  # what goes wrong is in the errors
        try:
            cluster = await self._is_cluster() if self._cluster is None else self._cluster
            client = await self._connect(cluster, self._addresses)
        except glide.GlideError as error:
            raise await self._explained(self._failure(error)) from error
        self._client = client
        self._scripts = {code: glide.Script(code) for code in (_SWAP, _CLAIM, _UNCLAIM)}

    async def present(self, names: Sequence[str]) -> list[bool]:
        batch = self._batch()
        for name in names:
            batch.exists([name])
        return [bool(count) for count in await self._exec(batch)]

    async def get(self, name: str) -> Buffer | None:
        try:
            value: bytes | None = await self._connected.get(name)
        except self._glide.GlideError as error:
            raise self._failure(error) from error
        return value

    async def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        batch = self._batch()
        for name in names:
            batch.get(name)
        return await self._exec(batch)

    async def get_head(self, name: str, nbytes: int) -> bytes | None:
        batch = self._batch()
        batch.getrange(name, 0, nbytes - 1)
        batch.exists([name])
        head, there = await self._exec(batch)
        return bytes(head) if head or there else None

    async def put(self, name: str, data: Buffer) -> None:
        # The client takes nothing but bytes without a copy of its own.
        value = data if isinstance(data, bytes) else bytes(data)
        try:
            await self._connected.set(name, value)
        except self._glide.GlideError as error:
            raise self._failure(error) from error

    async def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        return bool(await self._run(_SWAP, name, "absent" if expected is None else "present", expected or b"", data))

    async def delete(self, names: Sequence[str]) -> int:
        batch = self._batch()
        for name in names:
            batch.unlink([name])
        return sum(await self._exec(batch))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        client, glide = self._connected, self._glide
        match = prefix + "*"  # a prefix has no letter that means something in a pattern
        seen: set[bytes] = set()  # a scan may tell a name twice
        cursor: Any = glide.ClusterScanCursor() if isinstance(client, glide.GlideClusterClient) else b"0"
        while True:
            try:
                cursor, found = await client.scan(cursor, match=match, count=_SCAN)
            except glide.GlideError as error:
                raise self._failure(error) from error
            for name in found:
                if name not in seen:
                    seen.add(name)
                    yield name.decode("ascii", "replace")
            if cursor.is_finished() if isinstance(cursor, glide.ClusterScanCursor) else cursor == b"0":
                return

    async def capacity(self) -> Capacity:
        client, glide = self._connected, self._glide
        try:
            if isinstance(client, glide.GlideClusterClient):
                answer = await client.info([glide.InfoSection.MEMORY], route=glide.AllPrimaries())
                texts = list(answer.values()) if isinstance(answer, dict) else [answer]
            else:
                texts = [await client.info([glide.InfoSection.MEMORY])]
        except glide.GlideError as error:
            raise self._failure(error) from error
        nodes = [_parse_info(text) for text in texts]
        limits = [int(node.get("maxmemory", 0)) for node in nodes]
        used = sum(int(node.get("used_memory", 0)) for node in nodes)
        policies = sorted({node["maxmemory_policy"] for node in nodes if "maxmemory_policy" in node})
        return Capacity(sum(limits) if all(limits) else 0, used, _warnings(limits, policies))

    async def claim(self, name: str, owner: str, ttl_s: float) -> bool:
        return bool(await self._run(_CLAIM, name, owner, str(max(1, round(ttl_s * 1000)))))

    async def unclaim(self, name: str, owner: str) -> None:
        await self._run(_UNCLAIM, name, owner)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connect(self, cluster: bool, addresses: Sequence[tuple[str, int]]) -> GlideClient | GlideClusterClient:
        """Return a client that has had one answer."""
        glide = self._glide
        base = glide.TlsAdvancedConfiguration(root_pem_cacerts=self._root_certificates) if self._tls else None
        settings: dict[str, Any] = {
            "addresses": [glide.NodeAddress(host, port) for host, port in addresses],
            "use_tls": self._tls,
            "credentials": self._password and glide.ServerCredentials(self._password, self._username),
            "request_timeout": round(self._patience_s * 1000),
            "inflight_requests_limit": _IN_FLIGHT,
            # Creating a client blocks its event loop until it is connected, unless it connects when it is asked.
            "lazy_connect": True,
            "client_name": "tierkv",
        }
        client: GlideClient | GlideClusterClient
        if cluster:
            advanced = glide.AdvancedGlideClusterClientConfiguration(_CONNECT_MS, base)
            client = await glide.GlideClusterClient.create(
                glide.GlideClusterClientConfiguration(**settings, advanced_config=advanced)
            )
        else:
            single = glide.AdvancedGlideClientConfiguration(_CONNECT_MS, base)
            client = await glide.GlideClient.create(
                glide.GlideClientConfiguration(**settings, database_id=self._database, advanced_config=single)
            )
        try:
            await client.ping()
        except BaseException:
            await client.close()
            raise
        return client

    async def _is_cluster(self) -> bool:
        """Ask all servers; the first answer counts, as one that is down takes all the time there is."""
        asked = [asyncio.ensure_future(self._says_cluster(address)) for address in self._addresses]
        try:
            for number, answer in enumerate(asyncio.as_completed(asked), 1):
                try:
                    return await answer
                except self._glide.GlideError:
                    if number == len(asked):
                        raise
            raise AssertionError("there is an address")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _says_cluster(self, address: tuple[str, int]) -> bool:
        client = await self._connect(False, [address])
        try:
            found = _parse_info(await client.info([self._glide.InfoSection.CLUSTER]))
        finally:
            await client.close()
        return found.get("cluster_enabled") == "1"

    @property
    def _connected(self) -> Any:
        if self._client is None:
            raise BackendError("the client is not connected", kind="down", remedy=_REMEDIES["down"])
        return self._client

    def _batch(self) -> Any:
        glide, client = self._glide, self._connected
        return (glide.ClusterBatch if isinstance(client, glide.GlideClusterClient) else glide.Batch)(is_atomic=False)

    async def _exec(self, batch: Any) -> list[Any]:
        try:
            answers = await self._connected.exec(batch, raise_on_error=True)
        except self._glide.GlideError as error:
            raise self._failure(error) from error
        return list(answers)

    async def _run(self, script: str, name: str, *arguments: str | bytes) -> Any:
        try:
            return await self._connected.invoke_script(self._scripts[script], keys=[name], args=list(arguments))
        except self._glide.GlideError as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> BackendError:
        glide = self._glide
        said = str(error).strip()
        loud = said.upper()
        kind: _Kind = next((kind for kind, signs in _SIGNS if any(sign in loud for sign in signs)), "failed")
        if kind == "failed" and isinstance(error, glide.ConnectionError | glide.TimeoutError | glide.ClosingError):
            kind = "down"
        return BackendError(f"Valkey at {self._addresses[0][0]}:{self._addresses[0][1]}: {said}", kind=kind,
                            remedy=_REMEDIES[kind])  # fmt: skip

    async def _explained(self, failure: BackendError) -> BackendError:
        """Find out why there is no connection: the client tries until its time is up, and says that."""
        if failure.kind != "down":
            return failure
        host, port = self._addresses[0]
        found = await diagnosis.ask(host, port, tls=self._tls, root_certificates=self._root_certificates)
        if found is None:
            return failure
        return BackendError(f"Valkey at {host}:{port}: {found.said}", kind="down", remedy=found.remedy)


def _import_glide() -> Any:
    try:
        return importlib.import_module("glide")
    except ImportError:
        raise ConfigError(
            "Valkey and Redis are spoken to with valkey-glide, which is not installed",
            remedy="pip install 'tierkv-cache[shared]'",
        ) from None


def _parse_info(text: bytes) -> dict[str, str]:
    lines = text.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _warnings(limits: Sequence[int], policies: Sequence[str]) -> tuple[str, ...]:
    found = []
    if not all(limits):
        found.append(
            "maxmemory is not set: the server takes memory until the system ends it; set maxmemory, and "
            "maxmemory-policy to allkeys-lru"
        )
    found += [
        f"maxmemory-policy is {policy}: when it is full, blocks are refused and old ones stay; set it to allkeys-lru"
        for policy in policies
        if policy == "noeviction" or policy.startswith("volatile-")
    ]
    return tuple(found)
