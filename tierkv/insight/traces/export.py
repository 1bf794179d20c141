"""From what daemons recorded to a trace to give away: merged, cut, renamed, in Mooncake's format."""

from __future__ import annotations

import gzip
import json
import os
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tierkv.errors import InvalidRequest, StorageError
from tierkv.insight.traces.row import Namer, Row, parse_row

__all__ = ["Exported", "export", "new_file", "read_rows"]

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds: requests, distinct blocks, tokens of a block, seconds from the first to the last request.

    `cut_lines`: lines at the ends of files that were not written to their end, and so left out.
    """

    requests: int
    blocks: int
    block_tokens: int
    seconds: float
    cut_lines: int


def export(
    sources: Sequence[Path],
    output: Path,
    *,
    skip_s: float = 0.0,
    seconds: float | None = None,
    block_tokens: int | None = None,
    tenants: bool = True,
    sessions: bool = True,
) -> Exported:
    """Write one trace from recorded files, or directories of them. Blocks; holds all requests in memory.

    Blocks are numbered as they come, sessions and tenants hashed with a salt that is thrown away, and times begin at 0:
    two exports of one recording cannot be joined. `output` must not exist; compressed if it is called ``*.gz``.

    Parameters
    ----------
    skip_s, seconds
        Leave out the first `skip_s` seconds, and what comes `seconds` after that.
    block_tokens
        Make blocks of so many tokens from smaller ones; None: those that were recorded.
    tenants, sessions
        Whether they are in it.

    Raises `InvalidRequest` for a line that is not one, if there are no requests, for several sizes of blocks and for a
    size that is no multiple of those recorded, and `StorageError` for files that cannot be read or written.
    """
    rows: list[Row] = []
    cut_lines = 0
    for path in _files(sources):
        found, cut = read_rows(path)
        rows.extend(found)
        cut_lines += cut
    rows.sort(key=lambda row: row.timestamp)
    if rows:
        start = rows[0].timestamp + skip_s * 1000
        end = float("inf") if seconds is None else start + seconds * 1000
        rows = [row for row in rows if start <= row.timestamp < end]
    size = _block_tokens(rows, block_tokens)
    rows = list(_renamed((regrouped(row, size) for row in rows), tenants=tenants, sessions=sessions))
    with ExitStack() as stack:
        file: BinaryIO = stack.enter_context(new_file(output))
        if output.suffix == ".gz":
            # Neither name nor time of the file in its head.
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))  # type: ignore[assignment]
        for row in rows:
            fields = row.to_dict()
            del fields["block_tokens"]
            file.write(json.dumps(fields, separators=(", ", ": ")).encode() + b"\n")
    blocks = 1 + max((max(row.blocks, default=-1) for row in rows), default=-1)
    return Exported(len(rows), blocks, size, rows[-1].timestamp / 1000 if rows else 0.0, cut_lines)


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Read a recorded file, plain or gzipped, and count a last line that was not written to its end.

    Raises `InvalidRequest` naming file and line, and `StorageError`.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        rows.append(parse_row(line, f"{path}:{number}"))
                except InvalidRequest:
                    if line.endswith(b"\n"):
                        raise
                    return rows, 1
    except (EOFError, OSError) as error:
        why = getattr(error, "strerror", None) or error  # a damaged .gz has no other words
        raise StorageError(f"cannot read {path}: {why}", remedy="name files of a trace, or their directory") from None
    return rows, 0


def regrouped(row: Row, block_tokens: int) -> Row:
    """Return a request in larger blocks, each called after its last part: that stands for all before it, too."""
    parts = block_tokens // row.block_tokens
    if parts == 1:
        return row
    blocks = row.blocks[parts - 1 :: parts]
    if len(row.blocks) % parts:
        blocks.append(row.blocks[-1])
    return replace(row, blocks=blocks, block_tokens=block_tokens)


def new_file(path: Path) -> BinaryIO:
    """Make a file that only this user may read. Raises `StorageError`, also for one that is there already."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except FileExistsError:
        raise StorageError(f"{path} exists", remedy="choose another name, or remove it") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", remedy="choose another place") from None


def _files(sources: Sequence[Path]) -> Iterator[Path]:
    for source in sources:
        if source.is_dir():
            found = sorted(path for path in source.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
            if not found:
                raise InvalidRequest(f"there are no traces in {source}", remedy="name the directory of insight.trace")
            yield from found
        else:
            yield source


def _block_tokens(rows: Iterable[Row], wanted: int | None) -> int:
    sizes = sorted({row.block_tokens for row in rows})
    if not sizes:
        raise InvalidRequest("there are no requests", remedy="export a part in which there are some")
    named = ", ".join(map(str, sizes))
    if wanted is None:
        if len(sizes) > 1:
            raise InvalidRequest(
                f"there are blocks of {named} tokens, and a trace has one size", remedy="give --block-tokens"
            )
        return sizes[0]
    if any(wanted % size for size in sizes):
        raise InvalidRequest(
            f"blocks of {wanted} tokens cannot be made of those of {named}", remedy="give a multiple of them"
        )
    return wanted


def _renamed(rows: Iterable[Row], *, tenants: bool, sessions: bool) -> Iterator[Row]:
    namer = Namer(secrets.token_bytes(32))
    numbers: dict[int, int] = {}
    first: int | None = None
    for row in rows:
        first = row.timestamp if first is None else first
        yield replace(
            row,
            timestamp=row.timestamp - first,
            blocks=array("q", [numbers.setdefault(block, len(numbers)) for block in row.blocks]),
            session=namer.name(row.session.encode()) if sessions and row.session else "",
            tenant=namer.name(row.tenant.encode()) if tenants and row.tenant else "",
        )
