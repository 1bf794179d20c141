"""Pictures of the dashboard for docs/: ``make pictures``."""

from __future__ import annotations

import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.dashboard.conftest import CHROMIUM
from tests.dashboard.load import THREE_TIERS, working
from tests.service.daemon import ROOT, running

SECONDS = 75  # enough of a past for the chart
PICTURES = (("light", "light", 1200, 1500), ("dark", "dark", 1200, 1500), ("phone", "light", 390, 1000))


def main(directory: Path) -> None:
    with running(THREE_TIERS) as daemon, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        pages = {
            name: browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            for name, scheme, width, height in PICTURES
        }
        for page in pages.values():
            page.goto(daemon.tcp_url)
        with working(daemon):
            time.sleep(SECONDS)
            for name, page in pages.items():
                page.bring_to_front()
                page.screenshot(path=directory / f"dashboard-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(ROOT / "docs" / "pictures")
