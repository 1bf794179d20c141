"""Names in a backend: where an area, its blocks and its claims are.

<prefix>/<area>/generation                    the area's document, see `tierkv.storage.shared.generation`
<prefix>/<area>/<token>/<key>                 a block of that generation
<prefix>/<area>/claims/<key>                  who is about to make a block
"""

from __future__ import annotations

import re
from hashlib import blake2b

from tierkv.errors import ConfigError

__all__ = ["area_name", "block_name", "block_prefix", "check_prefix", "claim_name", "document_name", "key_of_name"]

_PREFIX = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_LONGEST_PREFIX = 64


def check_prefix(prefix: str) -> str:
    """Return `prefix`. Raises `ConfigError` when names cannot begin with it."""
    if len(prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"names of the shared tier cannot begin with {prefix!r}",
            remedy=f"use at most {_LONGEST_PREFIX} letters, digits, - and _, in parts separated by /",
        )
    return prefix


def area_name(prefix: str, tenant: bytes, namespace: bytes) -> str:
    """Return what all names of an area begin with: a tenant's blocks of one namespace."""
    return f"{prefix}/{blake2b(tenant + namespace, digest_size=16).hexdigest()}"


def document_name(area: str) -> str:
    """Return the name of the document that says which generation of an area counts."""
    return f"{area}/generation"


def block_prefix(area: str, generation: str) -> str:
    """Return what the names of a generation's blocks begin with."""
    return f"{area}/{generation}/"


def block_name(area: str, generation: str, key: bytes) -> str:
    """Return the name of a block."""
    return f"{area}/{generation}/{key.hex()}"


def claim_name(area: str, key: bytes) -> str:
    """Return the name under which a node says that it is about to make a block."""
    return f"{area}/claims/{key.hex()}"


def key_of_name(name: str) -> bytes | None:
    """Return the key in a block's name; None for a name that is not a block's."""
    try:
        key = bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return None
    return key if len(key) == 32 else None
