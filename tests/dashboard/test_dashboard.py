"""The dashboard in a real browser: what it says is true, everybody can read it, and it outlives the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.dashboard.load import SPEC, working
from tests.service.daemon import TIERS, Daemon, Raw, chain, eventually, running, short_directory
from tierkv.service.tokens import TokenFile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Scheme = Literal["light", "dark"]
LAPTOP, PHONE = (1280, 800), (390, 844)
PATIENCE_MS = 20_000

NUMBERS = """() => [...document.querySelectorAll("data[data-stat]")].map((e) => [e.dataset.stat, e.value])"""
NAMELESS = """() => [...document.querySelectorAll("#board data")].filter((number) => {
  const term = number.closest("dd")?.parentElement.querySelector("dt");
  if (term) return !term.textContent.trim();
  const cell = number.closest("td");
  const row = cell?.parentElement;
  const column = cell?.closest("table").tHead.rows[0].cells[cell.cellIndex];
  return !row?.querySelector("th[scope=row]")?.textContent.trim() || !column?.textContent.trim();
}).map((number) => number.outerHTML)"""


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = LAPTOP, scheme: Scheme = "light", *, quiet: bool = True
) -> Iterator[Page]:
    """The page, which must raise no error and, if `quiet`, write none to the console either."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if quiet and message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else faults.append(request.url))
    try:
        page.goto(url)
        yield page
        assert faults == []
    finally:
        page.close()


def at(stats: Any, path: str) -> Any:
    """The value at a path of the stats, 0 where a counter has not counted yet."""
    for name in path.split("."):
        stats = stats.get(name, 0) if isinstance(stats, dict) else 0
    return stats


def test_the_page_says_what_the_stats_say(browser: Browser, daemon: Daemon) -> None:
    """Every number, at the same moment."""
    with opened(browser, daemon.tcp_url) as page:
        with working(daemon):
            page.wait_for_selector("#board:visible")
        with daemon.connect() as cache:
            cache.flush()
        shown: dict[str, float] = {}
        stats: dict[str, Any] = {}

        def agree() -> bool:
            stats.update(Raw(daemon.tcp_port).request("GET", "/v1/stats")[1])
            shown.update((path, float(value)) for path, value in page.evaluate(NUMBERS))
            return bool(shown) and all(value == at(stats, path) for path, value in shown.items())

        eventually(agree)
        assert len(shown) > 50
        counters = stats["counters"]
        for counter in ("hit_tokens.hot", "hit_tokens.warm", "hit_tokens.cold", "saved_seconds", "hidden_seconds"):
            assert shown[f"counters.{counter}"] > 0, counter
        share = sum(counters["hit_tokens"].values()) / counters["requested_tokens"]
        assert f"{100 * share:.1f} %" in page.inner_text("#figures")
        for tenant in ("chat", "code"):
            row = page.locator("#tenants tbody tr", has_text=tenant)
            numbers = row.locator("data").evaluate_all("cells => cells.map((cell) => Number(cell.value))")
            known = stats["tenants"][tenant]
            used = [known["used_bytes"].get(tier, 0) for tier in ("hot", "warm", "cold")]
            assert numbers == [known["weight"], known["requested_tokens"], *used]
        assert "quota 7.0 MiB" in page.inner_text("#tenants")
        assert page.locator("#segments tbody tr").count() == len(stats["tiers"]["cold"]["segments"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_everybody_can_read_it(browser: Browser, daemon: Daemon, size: tuple[int, int], scheme: Scheme) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core: axe-playwright-python").Axe()
    with opened(browser, daemon.tcp_url, size, scheme) as page:
        with working(daemon):
            page.wait_for_selector("#misses tbody tr")
            page.wait_for_selector("#trunks tbody tr")
            page.wait_for_selector("#hits polygon")
        page.locator("summary").click()
        found = axe.run(page).response["violations"]
        assert [(fault["id"], fault["impact"], fault["nodes"][0]["html"]) for fault in found] == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        grounds = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (grounds == "rgb(246, 246, 244)") == (scheme == "light")


def test_prefixes_misses_and_faults_are_shown(browser: Browser, daemon: Daemon) -> None:
    with daemon.connect("night") as cache:
        cache.register(SPEC)
        cache.reserve(chain(2, spec=SPEC), ttl_s=0.01)
        cache.acquire(chain(3, spec=SPEC)).release()
    with opened(browser, daemon.tcp_url) as page:
        row = page.locator("#misses tbody tr", has_text="night")
        row.wait_for()
        assert "3 absent" in row.inner_text()
        page.locator("#faults tbody tr", has_text="write lease ended by its deadline").wait_for()
        page.locator("#trunks th.branch", has_text="SmolLM2-135M, blocks 0").first.wait_for()
        branches = page.locator("#trunks tbody tr")
        assert branches.count() > 10
        assert branches.locator("data[value]").count() >= 5 * branches.count()


def test_it_outlives_the_daemon(browser: Browser) -> None:
    with running(TIERS) as daemon, opened(browser, daemon.tcp_url, quiet=False) as page:
        page.wait_for_selector("#status[data-state=live]")
        before = page.get_attribute("body", "data-generation")
        daemon.configure({**TIERS, "port": daemon.tcp_port})
        daemon.kill()
        page.wait_for_selector("#status[data-state=lost]")
        assert page.inner_text("#status") == "not reachable, trying again"
        daemon.start()
        page.wait_for_selector("#status[data-state=live]")
        page.locator(".plot .across", has_text="restart").wait_for()
        page.wait_for_selector(".plot .mark", state="attached")
        assert page.get_attribute("body", "data-generation") != before
        assert "Traceback" not in daemon.log


def test_it_asks_for_the_token(browser: Browser) -> None:
    with short_directory() as directory:
        daemon = Daemon(directory)
        token = TokenFile(daemon.state_dir).create("chat", "reader")
        try:
            with opened(browser, daemon.start().tcp_url, quiet=False) as page:
                page.wait_for_selector("#ask:visible")
                assert not page.is_visible("#board")
                page.fill("#token", token[:-4] + "0000")
                page.click("button")
                page.wait_for_selector("#refused:has-text('not known')")
                page.fill("#token", token)
                page.keyboard.press("Enter")
                page.wait_for_selector("#board:visible")
                page.reload()
                page.wait_for_selector("#board:visible")
                assert token not in page.url
                assert token not in page.content()
                assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        finally:
            daemon.destroy()


def test_nobody_is_left_listening(browser: Browser, daemon: Daemon) -> None:
    for _ in range(3):
        with opened(browser, daemon.tcp_url) as page:
            page.wait_for_selector("#status[data-state=live]")
    raw = Raw(daemon.tcp_port)
    eventually(lambda: raw.request("GET", "/v1/stats")[1]["http"]["requests"] <= 1)
