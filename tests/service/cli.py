"""Run a command in this process, as from a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from tierkv.service.cli import main

Command = Callable[..., tuple[int, str, str]]


@contextmanager
def command(capfd: pytest.CaptureFixture[str], **environ: str) -> Iterator[Command]:
    """Lend a function that runs ``tierkv`` with its arguments; it returns exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code: object = 0
        with patch("sys.argv", ["tierkv", *map(str, arguments)]):
            try:
                main()
            except SystemExit as ended:
                code = ended.code or 0
        assert isinstance(code, int)
        said = capfd.readouterr()
        return code, said.out, said.err

    with patch.dict("os.environ", {"COLUMNS": "120", **environ}):
        yield run
