"""The composition root: from a configuration to a running engine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.config import Config, PolicyConfig
from tierkv.core.engine import Engine, Limits
from tierkv.core.placement import MemoryTier
from tierkv.core.sharing.sharing import SharingTerms
from tierkv.core.tenants import TenantRules
from tierkv.errors import ConfigError, StorageError, StoreInUse
from tierkv.policy import EvictionPolicy, make_policy
from tierkv.storage.cold import ColdTier
from tierkv.storage.hot import DeviceHotTier, make_hot_tier
from tierkv.storage.landing import device_sums
from tierkv.storage.tier import SlotTier
from tierkv.storage.warm import WarmTier

if TYPE_CHECKING:
    from tierkv.storage.shared import SharedStore

__all__ = [
    "bounds",
    "build_engine",
    "check_tiers",
    "cold_path",
    "make_state_directory",
    "node_name",
    "read_secret",
    "server_secret",
    "shared_store",
    "tenant_rules",
]

MIN_SEGMENT, MAX_SEGMENT = 16 << 20, 4 << 30
_SECRET_BYTES = 32


def build_engine(config: Config) -> Engine:
    """Open the tiers and start the engine. Blocks while memory is allocated and the cold index is read.

    Raises `ConfigError`, `StoreInUse`, `ForeignStore`, `StorageFull`, `StorageError` or `DeviceError`; whatever was
    opened before is closed again.
    """
    check_tiers(config)
    if config.state_dir is not None:
        make_state_directory(config.state_dir)
    secret = server_secret(config)
    instance = _instance(config.state_dir)
    _remove_leftovers(config.warm.directory)
    memory: list[MemoryTier] = []
    cold: ColdTier | None = None
    shared: SharedStore | None = None
    engine: Engine | None = None

    def cold_evicted(keys: list[bytes] | tuple[bytes, ...]) -> None:
        if engine is not None:
            engine.on_cold_evicted(keys)

    try:
        with _naming("hot", config.state_dir):
            if config.hot.capacity:
                path = config.warm.directory / f"{instance}.hot"
                hot = make_hot_tier(config.hot.capacity, device=config.hot.device, segment_path=path)
                memory.append(_memory_tier(hot, config.hot.policy, 1.0))  # hot blocks go down to warm at once
        with _naming("warm", config.state_dir):
            warm = WarmTier(config.warm.capacity, segment_path=config.warm.directory / f"{instance}.warm")
            memory.append(_memory_tier(warm, config.warm.policy, config.warm.demote_ahead))
            fastest = memory[0].tier
            if isinstance(fastest, DeviceHotTier):
                fastest.pool.copies_from(warm.shared()[0])
                sums = device_sums()
                if sums is not None:
                    fastest.verify_landings(sums)
        if config.cold.capacity:
            cold = ColdTier(
                cold_path(config),
                capacity_bytes=config.cold.capacity,
                segment_bytes=config.cold.segment or _segment_bytes(config.cold.capacity),
                codec=config.cold.codec,
                sync=config.cold.sync,
                sync_interval_s=config.cold.sync_interval,
                on_evict=cold_evicted,
                encode_threads=config.cold.encode_threads,
            )
        shared = shared_store(config)
        if shared is not None:
            shared.open()
        engine = Engine(
            memory,
            cold,
            secret,
            load_threads=config.load_threads,
            load_bytes=config.load_bytes,
            rules=tenant_rules(config),
            most=bounds(config),
            shared=shared,
            sharing=_sharing_terms(config),
        )
        return engine
    except BaseException:
        if shared is not None:
            shared.close()
        for level in memory:
            level.tier.close()
        if cold is not None:
            cold.close()
        raise


@contextlib.contextmanager
def _naming(tier: str, state_dir: Path | None) -> Iterator[None]:
    """Say in errors of a memory tier which settings they are about: the tier itself knows sizes and files only."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{tier}.capacity: {error.message}", remedy=error.remedy) from None
    except StoreInUse as error:
        if state_dir is None:
            raise
        raise StoreInUse(
            f"the state directory {state_dir} is in use: {error.message}",
            remedy="stop that process, or give each its own state_dir",
        ) from None


def _memory_tier(tier: SlotTier, policy: PolicyConfig, demote_ahead: float) -> MemoryTier:
    def make(capacity: int) -> EvictionPolicy[bytes]:
        return make_policy(policy.name, capacity, **policy.parameters)

    return MemoryTier(tier, make, demote_ahead)


def bounds(config: Config) -> Limits:
    """Return how much the configuration lets an engine remember."""
    return Limits(config.limits.namespaces, config.limits.tenants, config.limits.sessions)


def tenant_rules(config: Config) -> dict[str, TenantRules]:
    """Return what the configuration grants tenants."""
    rules: dict[str, TenantRules] = {}
    for name, granted in config.tenants.items():
        quotas = {"hot": granted.hot, "warm": granted.warm, "cold": granted.cold}
        known = {tier: int(quota) for tier, quota in quotas.items() if quota is not None}
        rules[name] = TenantRules(granted.weight, granted.scope or "", known)
    return rules


def check_tiers(config: Config) -> None:
    """Raise `ConfigError` for tiers that do not go together. Opens nothing."""
    if 0 < config.cold.capacity < config.warm.capacity:
        raise ConfigError(
            f"the cold tier of {config.cold.capacity} bytes is smaller than the warm tier of {config.warm.capacity}",
            remedy="give cold.capacity several times warm.capacity, or 0 to switch it off",
        )
    if config.cold.capacity and config.cold.path is None and config.state_dir is None:
        raise ConfigError("the cold tier has no place", remedy="set cold.path or state_dir")
    if config.shared.url is None:
        return
    if config.secret is None and config.state_dir is None:
        raise ConfigError(
            "blocks are shared by daemons with the same secret, and this one has none that lasts",
            remedy="set secret to a file that all of them have a copy of",
        )
    if config.shared.write == "demotion" and not config.cold.capacity:
        raise ConfigError(
            "shared.write is demotion, and there is no cold tier that blocks could reach",
            remedy="set shared.write to all or hits, or cold.capacity",
        )


def cold_path(config: Config) -> Path:
    """Return where the cold tier lies, or would if there were one."""
    return config.cold.path or (config.state_dir or Path()) / "cold"


def _segment_bytes(capacity: int) -> int:
    """A 32nd of the capacity, within bounds: the more segments there are, the closer recycling follows LRU."""
    return max(min(MIN_SEGMENT, capacity // 4), min(MAX_SEGMENT, capacity // 32))


def _instance(state_dir: Path | None) -> str:
    """Name of this cache's shared-memory files: the same after a restart, so that leftovers are found and removed."""
    if state_dir is None:
        return f"tierkv-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"tierkv-{os.getuid()}-{blake2b(str(state_dir.resolve()).encode(), digest_size=6).hexdigest()}"


def _remove_leftovers(directory: Path) -> None:
    """Remove shared memory of killed processes that had no state directory, and so no name to find it by again."""
    for path in directory.glob(f"tierkv-{os.getuid()}-*-*.*"):
        pid = path.name.split("-")[2]
        if not pid.isdecimal() or Path("/proc", pid).exists():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # A process of another PID namespace still holds its lock.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def make_state_directory(path: Path) -> None:
    """Make a state directory for this user only, unless it is there. Raises `StorageError`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {path}: {error.strerror}", remedy="choose another state_dir") from None


def shared_store(config: Config) -> SharedStore | None:
    """Return what daemons share blocks through, not open yet; None without one. Raises `ConfigError`."""
    shared = config.shared
    if shared.url is None:
        return None
    from tierkv.storage.shared import SharedStore, make_backend  # most caches have none, and start without it

    backend = make_backend(
        shared.url,
        username=shared.user,
        password_file=shared.password_file,
        root_certificates=shared.ca_file,
        options=shared.options,
    )
    known = config.state_dir / "shared" if config.state_dir is not None else None
    return SharedStore(
        backend,
        codec=config.cold.codec,
        in_flight=shared.in_flight,
        probe_timeout_s=shared.probe_timeout,
        transfer_timeout_s=shared.transfer_timeout,
        encode_threads=config.cold.encode_threads,
        hedge_s=shared.hedge,
        known=known,
    )


def node_name(config: Config) -> str:
    """Return what this machine is called among others."""
    return config.cluster.node or socket.gethostname()


def _sharing_terms(config: Config) -> SharingTerms:
    shared = config.shared
    return SharingTerms(shared.write, shared.hits, shared.write_rate, shared.probe_timeout, shared.sync)


def server_secret(config: Config) -> bytes:
    """Read the server secret, or make one. Keys derived from it outlive restarts only where it is kept.

    Raises `StorageError` and `ConfigError`.
    """
    if config.secret is not None:
        return read_secret(config.secret)
    state_dir = config.state_dir
    if state_dir is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = state_dir / "secret"
    try:
        if not path.exists():
            _write_secret(path)
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror}", remedy="choose another state_dir") from None
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Read a server secret. Raises `StorageError`, or `ConfigError` for one of another length or open to others."""
    try:
        secret, mode = path.read_bytes(), path.stat().st_mode
    except FileNotFoundError:
        raise StorageError(
            f"there is no secret at {path}",
            remedy="copy that of the other nodes there, mode 0600, or make the first: head -c 32 /dev/urandom > secret",
        ) from None
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror}", remedy="choose another state_dir") from None
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} does not hold a secret of {_SECRET_BYTES} bytes",
            remedy="restore it, or remove it together with the cold tier, whose blocks are lost without it",
        )
    if mode & 0o077:
        raise ConfigError(f"{path} is open to other users", remedy=f"chmod 600 {path}")
    return secret


def _write_secret(path: Path) -> None:
    """Make the secret appear whole or not at all; of two processes that write one, both go on with the first."""
    unfinished = path.with_name(f"secret.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
