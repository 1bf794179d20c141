"""Codecs of the cold tier, by name (configuration) and by id (containers)."""

from __future__ import annotations

from collections.abc import Mapping

from tierkv.errors import ConfigError, CorruptBlock
from tierkv.storage.codecs.base import Codec
from tierkv.storage.codecs.bx1 import Bx1
from tierkv.storage.codecs.eq import Eq2, Eq3, Eq4, Eq5, Int8
from tierkv.storage.codecs.raw import Raw

__all__ = ["CODECS", "Codec", "codec_by_id", "codec_by_name"]

CODECS: tuple[Codec, ...] = (Raw(), Bx1(), Int8(), Eq2(), Eq3(), Eq4(), Eq5())

_BY_NAME: Mapping[str, Codec] = {codec.name: codec for codec in CODECS}
_BY_ID: Mapping[int, Codec] = {codec.id: codec for codec in CODECS}


def codec_by_name(name: str) -> Codec:
    """Return the codec configuration calls `name`. Raises `ConfigError` for an unknown one."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}", remedy=f"use one of {', '.join(_BY_NAME)}") from None


def codec_by_id(number: int) -> Codec:
    """Return the codec containers call `number`. Raises `CorruptBlock` (cause ``codec``) for an unknown one."""
    try:
        return _BY_ID[number]
    except KeyError:
        raise CorruptBlock(
            f"a container names codec {number}, which this version does not know",
            cause="codec",
            remedy="read it with the version that wrote it, or drop the block",
        ) from None
