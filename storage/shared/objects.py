"""Object stores (S3 and what speaks like it, Google Cloud Storage, Azure) through obstore."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tierkv.errors import ConfigError
from tierkv.storage.shared.backend import Backend, BackendError, Buffer, Capacity
from tierkv.storage.shared.diagnosis import read_text

__all__ = ["ObjectBackend"]

_CHECK_NAME = "tierkv-conditional-write"
_LISTED_AT_ONCE = 1000
_CONDITIONAL = "use a store that honours If-Match and If-None-Match of a PUT"
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_CREDENTIALS = ("TokenRequest", "/latest/api/token")
"""The client asks the machine that it runs on, where it was given none."""
_NOWHERE = ("NoSuchBucket", "ContainerNotFound")
_REMEDIES = {
    "down": "check the endpoint, and that it can be reached from here",
    "refused": "check the credentials, and that they may read, write, list and delete in this bucket",
    "unknown": "give credentials as options, or in the environment as for the store's own tools",
    "failed": "look into the store's log",
}


class ObjectBackend(Backend):
    """Objects of a bucket. Has no claims, and must have conditional writes.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
    options
        As obstore takes them for this kind of store: ``endpoint``, ``region``, ``access_key_id`` ... What is not there
        comes from the environment, as for that store's own tools. An endpoint of http:// is spoken to unencrypted.
    root_certificates
        PEM of certificates to verify the store by, beside those of the system.
    patience_s
        Seconds after which the client gives a request up. Above every deadline of the tier, which is the one that
        decides.
    """

    kind: ClassVar[str] = "objects"
    probe_width: ClassVar[int] = 16
    largest_value: ClassVar[int] = 5 << 30

    def __init__(
        self,
        url: str,
        options: Mapping[str, str] | None = None,
        *,
        root_certificates: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self._url = url
        self._options = dict(options or {})
        self._root_certificates = root_certificates
        self._patience_s = patience_s
        self._store: Any = None
        self._obstore: Any = None

    async def open(self) -> None:
        self._obstore = obstore = _import_obstore()
        client_options: dict[str, Any] = {
            "timeout": timedelta(seconds=self._patience_s),
            "connect_timeout": timedelta(seconds=1),
            "allow_http": any(value.startswith("http://") for value in self._options.values()),
        }
        if self._root_certificates is not None:
            client_options["root_certificate"] = self._root_certificates
        try:
            self._store = importlib.import_module("obstore.store").from_url(
                self._url,
                config=self._options or None,
                client_options=client_options,
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=self._patience_s)},
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._shown} cannot be opened: {_first_line(error)}", remedy="check the URL and the options"
            ) from None
        await self._check_conditional_writes()

    async def present(self, names: Sequence[str]) -> list[bool]:
        return list(await asyncio.gather(*map(self._is_there, names)))

    async def get(self, name: str) -> Buffer | None:
        try:
            result = await self._obstore.get_async(self._store, name)
            return memoryview(await result.bytes_async())
        except FileNotFoundError:
            return None
        except self._errors as error:
            raise self._failure(error) from error

    async def get_many(self, names: Sequence[str]) -> list[bytes | None]:
        found = await asyncio.gather(*map(self.get, names))
        return [None if data is None else bytes(data) for data in found]

    async def get_head(self, name: str, nbytes: int) -> bytes | None:
        try:
            return bytes(await self._obstore.get_range_async(self._store, name, start=0, length=nbytes))
        except FileNotFoundError:
            return None
        except self._errors as error:
            # An empty object has no range at all.
            if await self._is_there(name) and (await self._head(name))["size"] == 0:
                return b""
            raise self._failure(error) from error

    async def put(self, name: str, data: Buffer) -> None:
        try:
            await self._obstore.put_async(self._store, name, data, use_multipart=False)
        except FileNotFoundError as error:
            raise self._nowhere from error
        except self._errors as error:
            raise self._failure(error) from error

    async def swap(self, name: str, expected: bytes | None, data: bytes) -> bool:
        done = await self._swap(name, expected, data)
        if done is None:
            raise BackendError(self._unconditional, kind="failed", remedy=_CONDITIONAL)
        return done

    async def delete(self, names: Sequence[str]) -> int:
        try:
            await self._obstore.delete_async(self._store, list(names))
        except FileNotFoundError:
            # Some stores mind, and stop at the first that is not there.
            if len(names) > 1:
                await asyncio.gather(*(self.delete([name]) for name in names))
        except self._errors as error:
            raise self._failure(error) from error
        return len(names)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        folder = prefix.rpartition("/")[0] or None
        try:
            async for found in self._obstore.list(self._store, folder, chunk_size=_LISTED_AT_ONCE):
                for meta in found:
                    if meta["path"].startswith(prefix):
                        yield meta["path"]
        except self._errors as error:
            raise self._failure(error) from error

    async def capacity(self) -> Capacity:
        """An object store has no bound of its own; asks whether it is there all the same."""
        await self._is_there(_CHECK_NAME)
        return Capacity()

    async def close(self) -> None:
        self._store = None

    async def _check_conditional_writes(self) -> None:
        """Put the same object twice, on condition that it is not there: the second time must be refused."""
        first, second = [await self._swap(_CHECK_NAME, None, b"1") for _ in range(2)]
        if first is None or second is not False:
            raise ConfigError(self._unconditional, remedy=_CONDITIONAL)

    async def _swap(self, name: str, expected: bytes | None, data: bytes) -> bool | None:
        """As `swap`; None for a store that has no conditional writes."""
        exceptions = self._obstore.exceptions
        try:
            mode: Any = "create"
            if expected is not None:
                result = await self._obstore.get_async(self._store, name)
                mode = {name: value for name in ("e_tag", "version") if (value := result.meta[name]) is not None}
                if bytes(await result.bytes_async()) != expected:
                    return False
            await self._obstore.put_async(self._store, name, data, mode=mode)
        except FileNotFoundError as error:
            if expected is None:
                raise self._nowhere from error
            return False
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return False
        except (exceptions.NotSupportedError, NotImplementedError):
            return None
        except self._errors as error:
            raise self._failure(error) from error
        return True

    async def _is_there(self, name: str) -> bool:
        try:
            await self._head(name)
        except FileNotFoundError:
            return False
        except self._errors as error:
            raise self._failure(error) from error
        return True

    async def _head(self, name: str) -> Any:
        return await self._obstore.head_async(self._store, name)

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, ValueError, OSError)

    @property
    def _shown(self) -> str:
        split = urlsplit(self._url)
        return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"

    def _failure(self, error: Exception) -> BackendError:
        exceptions, text = self._obstore.exceptions, str(error)
        if any(sign in text for sign in _NOWHERE):
            return self._nowhere
        said = _first_line(error)
        if any(sign in text for sign in _NO_CREDENTIALS):
            return BackendError(
                f"{self._shown}: no credentials to be had: {said}", kind="refused", remedy=_REMEDIES["unknown"]
            )
        if (found := read_text(text)) is not None:
            return BackendError(f"{self._shown}: {found.said}", kind="down", remedy=found.remedy)
        refused = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError
        if isinstance(error, refused) or "ExpiredToken" in text:
            return BackendError(f"{self._shown} refuses: {said}", kind="refused", remedy=_REMEDIES["refused"])
        if "QuotaExceeded" in text or "507" in said or "No space" in text:
            return BackendError(f"{self._shown} is full: {said}", kind="full", remedy="make room in the store")
        if isinstance(error, exceptions.GenericError | OSError):
            return BackendError(f"{self._shown}: {said}", kind="down", remedy=_REMEDIES["down"])
        return BackendError(f"{self._shown}: {said}", kind="failed", remedy=_REMEDIES["failed"])

    @property
    def _nowhere(self) -> BackendError:
        return BackendError(f"{self._shown} does not exist", kind="refused", remedy="create it, or name another")

    @property
    def _unconditional(self) -> str:
        return f"{self._shown} has no conditional writes, by which nodes agree on what was cleared"


def _import_obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(
            "object stores are spoken to with obstore, which is not installed",
            remedy="pip install 'tierkv-cache[shared]'",
        ) from None


def _first_line(error: Exception) -> str:
    """Return what an error says, with the store's own word for it instead of the beginning of its document."""
    text = str(error).strip() or type(error).__name__
    code = _CODE.search(text)
    line = text.splitlines()[0].partition("<?xml")[0].rstrip(": ")[:300]
    return line if code is None else f"{line}: {code[1]}"
