"""A real Chromium, and a daemon that has worked and works on while it is looked at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.dashboard.load import THREE_TIERS, working
from tests.service.daemon import Daemon, Raw, eventually, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Of one module: playwright's event loop must not be there any more when other modules run theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the dashboard is tested with playwright (pip install playwright)"
    )
    if CHROMIUM is None:
        pytest.skip("the dashboard is tested in Chromium (apt install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    pytest.importorskip("torch")  # of the hot tier
    with running(THREE_TIERS) as daemon:
        raw = Raw(daemon.tcp_port)

        def lively() -> bool:
            counters = raw.request("GET", "/v1/stats")[1]["counters"]
            return {"hot", "warm", "cold"} <= counters["hit_tokens"].keys() and counters["hidden_seconds"] > 0

        with working(daemon):
            eventually(lively)
        yield daemon
        assert "Traceback" not in daemon.log
