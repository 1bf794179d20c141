"""The shared tier: blocks that several nodes share through Valkey, Redis or an object store.."""

from tierkv.storage.shared.backend import Backend, BackendError, Capacity, SupportsClaims
from tierkv.storage.shared.generation import Change
from tierkv.storage.shared.health import Health
from tierkv.storage.shared.make import make_backend
from tierkv.storage.shared.store import SharedStore
from tierkv.storage.shared.tier import SharedTier

__all__ = [
    "Backend",
    "BackendError",
    "Capacity",
    "Change",
    "Health",
    "SharedStore",
    "SharedTier",
    "SupportsClaims",
    "make_backend",
]
