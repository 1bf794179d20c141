"""Names of blocks: chain hashes over tokens, and tenant-keyed storage keys over chain hashes.

    root    = H("tierkv" || fingerprint)
    h[i]    = H(h[i-1] || tokens[i] as little-endian u32 || extra_keys[i])          h[-1] = root
    key     = H(h[i] || group as little-endian u32)          keyed with the tenant key

H is BLAKE2b with a 32-byte digest (RFC 7693). Nothing here depends on the process, the machine or PYTHONHASHSEED.
A chain hash says *which tokens in which namespace*; only a tenant key turns it into a storage key, so nobody can
read, guess or probe another tenant's blocks, even knowing the tokens. Vectors: ``tests/vectors/keys.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "HASH_BYTES",
    "SESSION_CHARACTERS",
    "TENANT_NAME",
    "adopt_chain",
    "block_key",
    "chain_hashes",
    "chain_root",
    "share_key",
    "tenant_key",
]

HASH_BYTES = 32
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What tenants and share scopes can be called."""
SESSION_CHARACTERS = 128
"""Longest name of a session."""
_NO_EXTRA: Mapping[int, bytes] = {}


def chain_root(fingerprint: bytes) -> bytes:
    """Return the hash every chain of a namespace starts from."""
    return blake2b(b"tierkv" + fingerprint, digest_size=HASH_BYTES).digest()


def chain_hashes(
    root: bytes,
    tokens: ArrayLike,
    block_tokens: int,
    extra_keys: Mapping[int, bytes] = _NO_EXTRA,
) -> list[bytes]:
    """Hash every full block of a prompt.

    Parameters
    ----------
    root
        `chain_root` of the namespace.
    tokens
        Token ids, one dimension, each in [0, 2**32). A trailing partial block is not hashed.
    block_tokens
        Tokens per block.
    extra_keys
        Block index -> bytes for what the tokens do not say: image hashes, an adapter switch, a cache salt (block 0).

    Returns
    -------
    list of bytes
        One 32-byte hash per full block; ``hashes[i]`` covers tokens ``[0, (i + 1) * block_tokens)``.

    Raises
    ------
    InvalidRequest
        A token id is negative, too large or not an integer.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(
            f"tokens must be a one-dimensional array of integers, not {ids.ndim} dimensions of {ids.dtype}",
            remedy="pass a flat list of token ids",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= 2**32:
        raise InvalidRequest("a token id is outside [0, 2**32)", remedy="pass the tokenizer's ids unchanged")
    raw = np.ascontiguousarray(ids, dtype="<u4").data.cast("B")
    step = 4 * block_tokens
    hashes: list[bytes] = []
    previous = root
    for index in range(ids.size // block_tokens):
        hasher = blake2b(previous, digest_size=HASH_BYTES)
        hasher.update(raw[index * step : (index + 1) * step])
        if extra_keys:
            hasher.update(extra_keys.get(index, b""))
        previous = hasher.digest()
        hashes.append(previous)
    return hashes


def adopt_chain(root: bytes, hashes: Sequence[bytes]) -> list[bytes]:
    """Bring an engine's own chain hashes (of any length) into a namespace: ``H(root || hash)`` each.

    Engines such as vLLM chain their hashes already but leave model, dtype and layout out of them; the root adds these.
    """
    return [blake2b(root + h, digest_size=HASH_BYTES).digest() for h in hashes]


def tenant_key(server_secret: bytes, tenant: str) -> bytes:
    """Derive a tenant's key from the server secret (at most 64 bytes). Handed only to that tenant's own clients."""
    return blake2b(b"tenant\x00" + tenant.encode(), digest_size=HASH_BYTES, key=server_secret).digest()


def share_key(server_secret: bytes, scope: str) -> bytes:
    """Derive the key of a share scope: tenants that are members of the same one use it instead of their own."""
    return blake2b(b"share\x00" + scope.encode(), digest_size=HASH_BYTES, key=server_secret).digest()


def block_key(key: bytes, chain_hash: bytes, group: int) -> bytes:
    """Return the 32-byte storage key of one block of one KV group for the tenant whose `tenant_key` is `key`."""
    return blake2b(chain_hash + group.to_bytes(4, "little"), digest_size=HASH_BYTES, key=key).digest()
