"""Every error tierkv raises, one tree, split by cause.

    TierKVError
    +-- ConfigError              (ValueError)        a setting is unknown, of the wrong type or impossible here
    +-- InvalidRequest           (ValueError)        the caller's arguments cannot be served
    |   +-- SpecMismatch                             the data does not fit the namespace it names
    |   +-- BodyMismatch                             a body is shorter, longer or other than announced
    |   +-- BlockTooLarge                            a block can never fit the tier
    |   +-- Conflict                                 what is stored, or being stored, does not allow it now
    +-- NotFound                 (LookupError)       a namespace, block or ticket nobody knows
    +-- LeaseLost                (LookupError)       a lease expired, was released, or never existed
    +-- CorruptBlock                                 stored bytes fail verification; never a plain miss
    |   +-- ChecksumMismatch                         a writer announced another checksum than it wrote
    +-- StorageError             (OSError)           a file, directory or device refuses
    |   +-- StorageFull                              no space where a block should go
    |   +-- ForeignStore                             a file or directory that tierkv did not make
    |   +-- StoreInUse                               another process holds the store or the arena
    +-- TierFull                                     every slot is leased or not yet demoted
    +-- NotLoaded                                    a block was not in memory in the time given
    +-- LimitExceeded                                a bound on what one client or tenant may hold
    +-- DeviceError              (RuntimeError)      no such device, or its runtime refuses
    +-- Unavailable              (ConnectionError)   the daemon cannot be reached or is closing
    |   +-- Overloaded                               it has as much to do as it takes on; ask again
    +-- Unauthorized             (PermissionError)   a token is needed, and it is missing or not known
    +-- Forbidden                (PermissionError)   the token's role or tenant does not allow this
    +-- DependencyMissing        (ImportError)       an optional package is needed for this call

A message names the thing that failed; `remedy` says what to do about it. Over HTTP each class is one problem
type (`urn:tierkv:problem:<slug>`) and one status; on the command line, one exit code.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BlockTooLarge",
    "BodyMismatch",
    "ChecksumMismatch",
    "ConfigError",
    "Conflict",
    "CorruptBlock",
    "DependencyMissing",
    "DeviceError",
    "Forbidden",
    "ForeignStore",
    "InvalidRequest",
    "LeaseLost",
    "LimitExceeded",
    "NotFound",
    "NotLoaded",
    "SpecMismatch",
    "StorageError",
    "StorageFull",
    "StoreInUse",
    "TierFull",
    "TierKVError",
    "Unauthorized",
    "Unavailable",
    "error_classes",
]


class TierKVError(Exception):
    """Base of every tierkv error.

    Parameters
    ----------
    message
        What failed, naming the thing.
    remedy
        What the reader can do about it; empty when there is nothing to do.
    """

    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class ConfigError(TierKVError, ValueError):
    slug, status, exit_code = "config", 500, 2


class InvalidRequest(TierKVError, ValueError):
    slug, status, exit_code = "invalid-request", 400, 2


class SpecMismatch(InvalidRequest):
    slug, status = "spec-mismatch", 409


class BodyMismatch(InvalidRequest):
    slug, status = "body-mismatch", 400


class BlockTooLarge(InvalidRequest):
    slug, status = "block-too-large", 413


class Conflict(InvalidRequest):
    slug, status = "conflict", 409


class NotFound(TierKVError, LookupError):
    slug, status, exit_code = "not-found", 404, 3


class LeaseLost(TierKVError, LookupError):
    slug, status, exit_code = "lease-lost", 410, 3


class CorruptBlock(TierKVError):
    """Stored bytes failed verification.

    Parameters
    ----------
    cause
        A short stable word for the metric label: ``checksum``, ``truncated``, ``header``, ``codec`` ...
    """

    slug, status, exit_code = "corrupt-block", 500, 4

    def __init__(self, message: str, *, cause: str = "checksum", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.cause = cause


class ChecksumMismatch(CorruptBlock):
    slug, status = "checksum-mismatch", 422


class StorageError(TierKVError, OSError):
    slug, status, exit_code = "storage", 500, 5


class StorageFull(StorageError):
    slug, status = "storage-full", 507


class ForeignStore(StorageError):
    slug, status = "foreign-store", 500


class StoreInUse(StorageError):
    slug, status = "store-in-use", 500


class TierFull(TierKVError):
    slug, status, exit_code = "tier-full", 503, 6


class NotLoaded(TierKVError):
    slug, status, exit_code = "not-loaded", 503, 6


class LimitExceeded(TierKVError):
    slug, status, exit_code = "limit-exceeded", 429, 6


class DeviceError(TierKVError, RuntimeError):
    slug, status, exit_code = "device", 500, 7


class Unavailable(TierKVError, ConnectionError):
    slug, status, exit_code = "unavailable", 503, 8


class Overloaded(Unavailable):
    slug, status = "overloaded", 503


class Unauthorized(TierKVError, PermissionError):
    slug, status, exit_code = "unauthorized", 401, 10


class Forbidden(TierKVError, PermissionError):
    slug, status, exit_code = "forbidden", 403, 10


class DependencyMissing(TierKVError, ImportError):
    slug, status, exit_code = "dependency-missing", 500, 9


def error_classes() -> dict[str, type[TierKVError]]:
    """Map every slug to its class, so that a client can raise what the daemon raised."""
    found: dict[str, type[TierKVError]] = {}
    todo: list[type[TierKVError]] = [TierKVError]
    while todo:
        cls = todo.pop()
        if "slug" in vars(cls):  # others are their parent to everybody outside
            found[cls.slug] = cls
        todo.extend(cls.__subclasses__())
    return found
