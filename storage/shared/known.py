"""What a node knows of its areas, kept in a file: after a restart it tells what others did meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from tierkv.errors import StorageError
from tierkv.storage.private_file import replace_private
from tierkv.storage.shared.generation import Document, decode, encode
from tierkv.storage.tier import checksum

__all__ = ["Known", "load", "save"]

log = logging.getLogger(__name__)

_MAGIC = b"TKVK\x01"


@dataclass(frozen=True, slots=True)
class Known:
    """What a node knows of one area.

    Attributes
    ----------
    tenant, namespace
        Whose blocks they are.
    document
        The latest one it has seen or made; None for none yet.
    clearing, forgetting
        What it has done itself and others cannot know of yet.
    cleared, deleted
        What others did and nobody here was told of yet.
    """

    tenant: bytes
    namespace: bytes
    document: Document | None = None
    clearing: bool = False
    forgetting: tuple[bytes, ...] = ()
    cleared: bool = False
    deleted: tuple[bytes, ...] = ()


def load(path: Path) -> list[Known]:
    """Read what was saved; nothing for a file that is not there or is damaged. Blocks.

    Raises `StorageError` when the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}", remedy="give tierkv its own directory") from error
    try:
        body = data[len(_MAGIC) + 8 :]
        if data[: len(_MAGIC)] == _MAGIC and checksum(body) == int.from_bytes(data[len(_MAGIC) :][:8], "little"):
            return [_area(fields) for fields in msgpack.unpackb(body)]
    except (ValueError, TypeError, msgpack.UnpackException):
        pass
    log.warning("%s is damaged: what other nodes did while this one was away is not known", path)
    return []


def save(path: Path, areas: Iterable[Known]) -> None:
    """Write what is known in place of what was there, which stays whole until then. Blocks. Raises `StorageError`."""
    body = msgpack.packb([_fields(area) for area in areas])
    data = _MAGIC + checksum(body).to_bytes(8, "little") + body
    try:
        replace_private(path, data)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}", remedy="check the directory and the disk") from error


def _fields(area: Known) -> list[Any]:
    document = None if area.document is None else encode(area.document)
    return [area.tenant, area.namespace, document, area.clearing, area.forgetting, area.cleared, area.deleted]


def _area(fields: list[Any]) -> Known:
    tenant, namespace, document, clearing, forgetting, cleared, deleted = fields
    known = None if document is None else decode(document)
    return Known(tenant, namespace, known, clearing, tuple(forgetting), cleared, tuple(deleted))
