"""A demonstration on a real model: what a shared prompt costs without tierkv, with it, and after a restart.

`run` starts a daemon of its own, lets a coding assistant answer eight requests of two users, restarts the daemon in
between, and shows which tokens were reused from which tier and whether a single token changed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.errors import DependencyMissing

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(json_path: Path | None, console: Console, *, keep: bool = False) -> int:
    """Run the demonstration and print its report. Blocks for minutes.

    Parameters
    ----------
    json_path
        Where to write the report as JSON as well, or None.
    keep
        Leave the working directory (daemon log, cold tier) in place and print its path.

    Returns
    -------
    int
        Exit code: 0 if every cached answer equals the uncached one, the other tenant reused nothing and the cache
        never failed, else 1.

    Raises
    ------
    DependencyMissing
        A package of the ``demo`` extra or the model's package is not installed.
    Unavailable
        The daemon does not start, or ends by itself.
    """
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if find_spec(package) is None:
            raise DependencyMissing(f"the demo needs the package {package}", remedy="pip install 'tierkv-cache[demo]'")
    from tierkv.service.demo.phases import demonstrate

    return demonstrate(json_path, console, keep=keep)
