"""A log that can be read several times: a file, plain or gzipped, or standard input kept in a temporary file."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tierkv.errors import InvalidRequest, StorageError
from tierkv.insight.lint.readers.arrays import read_arrays
from tierkv.insight.lint.readers.entry import Entry, Format
from tierkv.insight.lint.readers.parse import detect, parse

__all__ = ["Log", "open_log"]

_BATCH_TOKENS = 1 << 18
_GZIP, _NUMPY, _ZIP = b"\x1f\x8b", b"\x93NUMPY", b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Log:
    """Where a log is and how it is written.

    Attributes
    ----------
    name
        For messages: the path, or `<stdin>`.
    skip_bad
        Leave out lines that cannot be read instead of failing at the first.
    """

    path: Path
    name: str
    format: Format
    skip_bad: bool = False

    def entries(self, skipped: list[str] | None = None) -> Iterator[Entry]:
        """Yield the requests in order; what `skip_bad` leaves out is named in `skipped`.

        Raises `InvalidRequest` naming file and line, or `StorageError`.
        """
        if self.format is Format.NUMPY:
            yield from self._rows()
            return
        for number, line in self._lines():
            try:
                text = self._decoded(line, number)
                if text.strip():
                    yield from list(parse(text, self.format, number, self.name))
            except InvalidRequest as error:
                if not self.skip_bad:
                    raise
                if skipped is not None:
                    skipped.append(error.message)

    def _rows(self) -> Iterator[Entry]:
        number = 0
        for tokens, lengths in read_arrays(self.path, self.name, _BATCH_TOKENS):
            for prompt in np.split(tokens, np.cumsum(lengths)[:-1]):
                yield Entry(number, prompt)
                number += 1

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with _reading(self.path, self.name) as file:
            head = file.read(1 << 16).lstrip()
            file.seek(0)
            if head[:1] == b"[" and self.format not in (Format.TEXT, Format.TOKENS):
                values = self._list(file)
                yield from ((number, json.dumps(value).encode()) for number, value in enumerate(values, start=1))
            else:
                yield from enumerate(file, start=1)

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            return line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{self.name}:{number}: not UTF-8 at byte {error.start}", remedy="convert the log, or use --skip-bad"
            ) from None

    def _list(self, file: BinaryIO) -> list[object]:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{self.name}: not a JSON list: {error}", remedy="write one object a line") from None
        return value if isinstance(value, list) else [value]


@contextmanager
def open_log(path: Path, kind: Format | None = None, skip_bad: bool = False) -> Iterator[Log]:
    """Open a log; `-` is standard input. The format is that of its first line, unless it is given.

    Raises `StorageError` if it cannot be read, `InvalidRequest` if there is nothing in it.
    """
    if str(path) == "-":
        with tempfile.NamedTemporaryFile(prefix="tierkv-lint-") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            file = Path(kept.name)
            yield Log(file, "<stdin>", kind or _detect(file, "<stdin>"), skip_bad)
    else:
        yield Log(path, str(path), kind or _detect(path, str(path)), skip_bad)


def _detect(path: Path, name: str) -> Format:
    with _reading(path, name) as file:
        head = file.read(8)
        if head.startswith((_NUMPY, _ZIP)):
            return Format.NUMPY
        file.seek(0)
        for line in file:
            text = line.decode(errors="replace").strip()
            if not text:
                continue
            # A list over several lines: its first object tells.
            return _detect_list(path, name) if text.startswith("[") and not _is_json(text) else _detect_text(text)
    raise InvalidRequest(f"{name}: nothing in it", remedy="name a log with at least one request")


def _detect_text(text: str) -> Format:
    if text.startswith("["):
        value = json.loads(text)
        if value and isinstance(value[0], dict):
            return detect(json.dumps(value[0]))
    return detect(text)


def _detect_list(path: Path, name: str) -> Format:
    try:
        with _reading(path, name) as file:
            value = json.load(file)
    except (ValueError, RecursionError):
        return Format.TEXT
    return detect(json.dumps(value[0])) if isinstance(value, list) and value else Format.TEXT


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@contextmanager
def _reading(path: Path, name: str) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
            file.seek(0)
            if not zipped:
                yield file
                return
            with gzip.open(file) as unzipped:
                yield unzipped  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{name}: the compressed file is damaged: {error}", remedy="get the log again") from None
    except OSError as error:
        raise StorageError(f"cannot read {name}: {error.strerror}", remedy="name an existing, readable log") from None
