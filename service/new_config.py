"""`tierkv config init`: the commented default configuration as a file to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from tierkv.errors import InvalidRequest, StorageError

__all__ = ["default_text", "write_default"]


def default_text() -> str:
    """Return the commented file with every setting at its default."""
    return resources.files("tierkv").joinpath("default.yaml").read_text(encoding="utf-8")


def write_default(path: Path, *, force: bool) -> None:
    """Write it. Raises `InvalidRequest` for a file that exists, unless `force`, and `StorageError`."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(default_text())
    except FileExistsError:
        raise InvalidRequest(f"{path} exists", remedy="choose another path, or overwrite it with --force") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", remedy="choose another path") from None
