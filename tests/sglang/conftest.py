"""A daemon for engines to share. Without SGLang, as in the environment of `make test`, nothing here is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from typing import Any

import pytest

from tests.service.daemon import Daemon, running

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

_numbers = count()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with running() as started:
        yield started


@pytest.fixture
def own(daemon: Daemon) -> dict[str, Any]:
    """An extra config whose pages no other test finds."""
    return {"url": daemon.url, "weights": f"revision-{next(_numbers)}"}


@pytest.fixture
def attach() -> Iterator[Callable[..., Any]]:
    """Makes controllers that are detached in the end."""
    from tests.sglang.released import Controller

    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Any:
            controller = Controller(*args, **options)
            stack.callback(controller.close)
            return controller

        yield make
