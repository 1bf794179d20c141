from collections.abc import Iterator

import pytest

from tests.service.daemon import Daemon, Raw, running


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon
        assert daemon.process is not None
        assert daemon.process.poll() is None, f"the daemon died: {daemon.log}"
        assert "Traceback" not in daemon.log


@pytest.fixture
def raw(daemon: Daemon) -> Raw:
    return Raw(daemon.tcp_port)
