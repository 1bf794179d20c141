"""The file of tokens: who may ask the daemon, for which tenant, in which role. Secrets are kept as hashes only."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from tierkv.errors import ConfigError, InvalidRequest, NotFound, StorageError
from tierkv.keys import TENANT_NAME

__all__ = ["ROLES", "Role", "Token", "TokenFile", "parse_token"]

Role = Literal["engine", "reader", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
_SECRET_BYTES = 32
_TOKEN = re.compile(r"tkv_(?P<id>[0-9a-f]{8})_(?P<secret>[0-9a-f]{64})")
_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEAD = "# Tokens of a tierkv daemon: `tierkv token new`, `list` and `revoke` keep this file. Secrets are not in it.\n"


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token.

    Attributes
    ----------
    id
        Its public name, 8 hex digits.
    sha256
        SHA-256 of its secret, in hex. The secret is 256 random bits: nothing slower is needed against guessing.
    tenant
        Whose blocks its bearer works with.
    role
        What its bearer may do.
    created
        When it was made, UTC, ISO 8601.
    """

    id: str
    sha256: str
    tenant: str
    role: Role
    created: str

    def has_secret(self, secret: str) -> bool:
        """Say whether this is the token's secret, in a time that does not depend on the answer."""
        return hmac.compare_digest(_digest(secret), self.sha256)


class TokenFile:
    """The tokens of one state directory, mode 0600.

    Where the file exists a token is needed, also when it holds none any more.

    Parameters
    ----------
    state_dir
        The daemon's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "tokens.yaml"

    def read(self) -> tuple[Token, ...] | None:
        """Return all tokens, None if there is no file. Raises `ConfigError` or `StorageError`. Reads a file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused(error) from None
        try:
            with open(descriptor, encoding="utf-8") as file:
                if os.fstat(descriptor).st_mode & 0o077:
                    raise ConfigError(f"{self.path} is open to other users", remedy=f"chmod 600 {self.path}")
                data = yaml.safe_load(file)
        except OSError as error:
            raise self._refused(error) from None
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            raise self._damaged("it is not valid YAML") from None
        return self._parse([] if data is None else data)

    def create(self, tenant: str, role: Role) -> str:
        """Add a token and return it whole: it cannot be shown again. Makes directory and file if need be.

        Raises `InvalidRequest` for what is no tenant's name, and what `read` raises. Blocks while another process
        changes the file.
        """
        if not TENANT_NAME.fullmatch(tenant):
            raise InvalidRequest(
                f"{tenant[:100]!r} is not a tenant name",
                remedy="use 1 to 64 letters, digits, dots, dashes or underscores",
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from None
        with self._changing():
            tokens = self.read() or ()
            taken = {token.id for token in tokens}
            name = next(fresh for fresh in iter(lambda: secrets.token_hex(4), None) if fresh not in taken)
            secret = secrets.token_hex(_SECRET_BYTES)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            self._write((*tokens, Token(name, _digest(secret), tenant, role, created)))
        return f"tkv_{name}_{secret}"

    def revoke(self, token_id: str) -> Token:
        """Remove a token and return what it was. Raises `NotFound`, and what `read` raises. Blocks as `create`."""
        with self._changing():
            tokens = self.read() or ()
            gone = next((token for token in tokens if token.id == token_id), None)
            if gone is None:
                raise NotFound(f"no token has the id {token_id[:100]!r}", remedy="tierkv token list shows them")
            self._write(tuple(token for token in tokens if token is not gone))
        return gone

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other processes from changing the file: one of two new tokens would be lost."""
        try:
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from None
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _write(self, tokens: tuple[Token, ...]) -> None:
        """Replace the file, whole or not at all."""
        text = _HEAD + yaml.safe_dump([asdict(token) for token in tokens], sort_keys=False)
        try:
            descriptor, unfinished = tempfile.mkstemp(prefix="tokens.", dir=self.path.parent)  # mode 0600
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, self.path)
            except BaseException:
                os.unlink(unfinished)
                raise
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise self._refused(error) from None

    def _parse(self, data: Any) -> tuple[Token, ...]:
        tokens: dict[str, Token] = {}
        for number, row in enumerate(data if isinstance(data, list) else [data], 1):
            match row:
                case {
                    "id": str(name),
                    "sha256": str(digest),
                    "tenant": str(tenant),
                    "role": ("engine" | "reader" | "operator") as role,
                    "created": str(created),
                } if (
                    len(row) == 5
                    and _ID.fullmatch(name)
                    and _DIGEST.fullmatch(digest)
                    and TENANT_NAME.fullmatch(tenant)
                    and name not in tokens
                ):
                    tokens[name] = Token(name, digest, tenant, role, created)
                case _:
                    raise self._damaged(
                        f"entry {number} is not a token of its own with id, sha256, tenant, created and a role of"
                        f" {', '.join(ROLES)}"
                    )
        return tuple(tokens.values())

    def _damaged(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be understood: {fault}", remedy="restore it, or remove it and make new tokens"
        )

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"cannot use {self.path}: {error.strerror}", remedy="choose another state_dir")


def parse_token(text: str) -> tuple[str, str] | None:
    """Return id and secret of what is written as a token, None of anything else."""
    match = _TOKEN.fullmatch(text)
    return (match["id"], match["secret"]) if match else None


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
