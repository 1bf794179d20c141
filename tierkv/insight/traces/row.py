"""One recorded request: its fields as hashes, and its line of JSON."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tierkv.core.observing import SeenRequest
from tierkv.errors import InvalidRequest
from tierkv.replay.trace import BLOCK_TOKENS

__all__ = ["Namer", "Row", "parse_row", "trace_salt"]

_SALT_BYTES = 32
_ID_BITS = 53  # what every reader of JSON can hold
_NAME_DIGITS = 16
_TENANTS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """A request.

    Attributes
    ----------
    timestamp
        Arrival, milliseconds.
    blocks
        Ids of its whole blocks, the first one first.
    tokens, block_tokens
        Tokens of the prompt, as far as they are known, and of a block.
    output_tokens
        Length of the answer; 1 where it is not known.
    session, tenant
        Hashes of the conversation and of the tenant; empty where there is none.
    """

    timestamp: int
    blocks: array[int]
    tokens: int
    block_tokens: int
    output_tokens: int = 1
    session: str = ""
    tenant: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as the daemon writes it."""
        named = {"session_id": self.session, "tenant": self.tenant}
        return {
            "timestamp": self.timestamp,
            "input_length": self.tokens,
            "output_length": self.output_tokens,
            "hash_ids": self.blocks.tolist(),
            **{name: value for name, value in named.items() if value},
            "block_tokens": self.block_tokens,
        }


class Namer:
    """Gives blocks, sessions and tenants names that say nothing, the same for one salt. Not for several threads."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._blocks: dict[bytes, Callable[[bytes], int]] = {}

    def row(self, seen: SeenRequest) -> Row:
        """Make a request nameless."""
        block_tokens = seen.namespace.spec.block_tokens
        name = self._blocks.get(seen.tenant.key)
        if name is None:
            if len(self._blocks) >= _TENANTS_KEPT:
                self._blocks.clear()
            name = self._blocks[seen.tenant.key] = self._block_name(seen.tenant.key)
        conversation = (seen.tenant.id, seen.namespace.fingerprint, seen.session.encode())
        return Row(
            timestamp=round((seen.at - seen.waited_s) * 1000),
            blocks=array("q", map(name, seen.hashes)),
            tokens=len(seen.hashes) * block_tokens,
            block_tokens=block_tokens,
            session=self.name(*conversation) if seen.session else "",
            tenant=self.name(seen.tenant.id),
        )

    def name(self, *parts: bytes) -> str:
        """Return 16 hex digits for what the parts name together."""
        digest = blake2b(key=self._salt, digest_size=_NAME_DIGITS // 2)
        for part in parts:
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.hexdigest()

    def _block_name(self, tenant_key: bytes) -> Callable[[bytes], int]:
        """Tenants that share blocks have one key, and so the same ids."""
        key = blake2b(tenant_key, key=self._salt, digest_size=_SALT_BYTES).digest()

        def name(chain_hash: bytes) -> int:
            return int.from_bytes(blake2b(chain_hash, key=key, digest_size=8).digest()) >> (64 - _ID_BITS)

        return name


def trace_salt(secret: bytes) -> bytes:
    """Derive the salt of a daemon's traces from its server secret."""
    return blake2b(b"trace\0", key=secret, digest_size=_SALT_BYTES).digest()


def parse_row(line: bytes, where: str) -> Row:
    """Read a line that the daemon wrote, or one of another trace in Mooncake's format: then of blocks of 512 tokens.

    Raises `InvalidRequest` naming `where`.
    """
    try:
        row = json.loads(line)
        blocks = array("q", row["hash_ids"])
        found = Row(
            round(row["timestamp"]),
            blocks,
            int(row["input_length"]),
            int(row.get("block_tokens", BLOCK_TOKENS)),
            int(row.get("output_length", 1)),
            str(row.get("session_id", "")),
            str(row.get("tenant", "")),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"{where}: not a line of a trace: {type(error).__name__}: {str(error)[:100]}",
            remedy="a line is an object of timestamp, input_length and hash_ids",
        ) from None
    if found.block_tokens < 1 or len(blocks) != -(-found.tokens // found.block_tokens):
        raise InvalidRequest(
            f"{where}: {found.tokens} tokens do not make {len(blocks)} blocks of {found.block_tokens}",
            remedy="a trace that does not say block_tokens has blocks of 512",
        )
    return found
