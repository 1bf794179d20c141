"""How nodes know each other: a request is signed with a key that all who have the server secret can derive.

    Tierkv-Node: <unix seconds>-<nonce>-<mac>
    key = H_keyed(secret, "node" || 0)
    mac = H_keyed(key, method || LF || path || LF || <unix seconds>-<nonce> || LF || H(body))

H is BLAKE2b with 32 bytes; the nonce is 16 hex digits, the mac 64. A signature counts for half a minute around the
receiver's clock. It can be replayed in that time, so it is for requests that change nothing. It hides nothing: that is
for TLS to do. Vectors: ``tests/vectors/node.json``.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tierkv.errors import Unauthorized
from tierkv.keys import HASH_BYTES

__all__ = ["NODE_HEADER", "NODE_PATTERN", "WINDOW_S", "NodeKey", "Signature", "read_signature", "secret_fingerprint"]

NODE_HEADER = "Tierkv-Node"
NODE_PATTERN = "^[0-9]{1,12}-[0-9a-f]{16}-[0-9a-f]{64}$"
WINDOW_S = 30
_NONCE_BYTES = 8
_FORM = re.compile(r"(?P<stamp>(?P<at>[0-9]{1,12})-[0-9a-f]{16})-(?P<mac>[0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a request says of who sent it: when, under which nonce (both in `stamp`), and the mac, in hex."""

    stamp: str
    mac: str


class NodeKey:
    """Signs requests to other nodes and checks those of others.

    Parameters
    ----------
    secret
        The server secret, 16 to 64 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(b"node\x00", digest_size=HASH_BYTES, key=secret).digest()

    def sign(self, method: str, path: str, body: bytes, *, at: float | None = None, nonce: bytes | None = None) -> str:
        """Return the header of a request that is sent at `at` (seconds since the epoch; None: now)."""
        nonce = secrets.token_bytes(_NONCE_BYTES) if nonce is None else nonce
        stamp = f"{int(time.time() if at is None else at)}-{nonce.hex()}"
        return f"{stamp}-{self._mac(method, path, stamp, body)}"

    def check(self, signature: Signature, method: str, path: str, body: bytes) -> None:
        """Raise `Unauthorized` for a request that was not signed with this key, in a time that tells nothing."""
        if not hmac.compare_digest(self._mac(method, path, signature.stamp, body), signature.mac):
            raise Unauthorized(
                "the request is signed with another server secret, or is not what was signed",
                remedy="give all nodes the same secret: `tierkv doctor` shows its fingerprint",
            )

    def _mac(self, method: str, path: str, stamp: str, body: bytes) -> str:
        signed = f"{method}\n{path}\n{stamp}\n".encode() + blake2b(body, digest_size=HASH_BYTES).digest()
        return blake2b(signed, digest_size=HASH_BYTES, key=self._key).hexdigest()


def read_signature(headers: Sequence[str], *, now: float | None = None) -> Signature:
    """Return the signature among the values of `NODE_HEADER` that a request came with; not checked yet.

    Raises `Unauthorized` unless there is exactly one, of the right form and time: then the body need not be read.
    """
    match = _FORM.fullmatch(headers[0]) if len(headers) == 1 else None
    if match is None:
        raise Unauthorized(
            f"this is for nodes of the cluster, and needs one header {NODE_HEADER}", remedy="docs/wire.md has its form"
        )
    age_s = (time.time() if now is None else now) - int(match["at"])
    if not -WINDOW_S <= age_s <= WINDOW_S:
        raise Unauthorized(
            f"the request was signed {abs(age_s):.0f} s {'ago' if age_s > 0 else 'from now'}, by the clocks of both",
            remedy="synchronise the clocks of the nodes",
        )
    return Signature(match["stamp"], match["mac"])


def secret_fingerprint(secret: bytes) -> str:
    """Return 8 hex digits to compare the server secrets of nodes by; they tell nothing of the secret itself."""
    return blake2b(b"fingerprint\x00", digest_size=4, key=secret).hexdigest()
