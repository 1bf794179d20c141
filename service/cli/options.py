"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigOption", "JsonFileOption", "JsonOption", "StateDirOption", "UrlOption"]

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; tierkv config init writes one.")]
StateDirOption = Annotated[Path | None, typer.Option("--state-dir", help="Where the secret and the cold tier live.")]
UrlOption = Annotated[
    str, typer.Option("--url", envvar="TIERKV_URL", help="unix:///path/to/socket or http://127.0.0.1:port")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JsonFileOption = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]
