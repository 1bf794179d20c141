"""Why not cached, what other capacities would give, audits and the shared tier: what the page says of them is true."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboard.load import working
from tests.dashboard.test_dashboard import LAPTOP, NAMELESS, NUMBERS, PHONE, Scheme, at, opened
from tests.insight.live.audits import AUDIT, CORRUPT
from tests.servers.redis import MISSING_REDIS, RedisServer
from tests.service.cluster.nodes import node
from tests.service.daemon import TIERS, Daemon, Raw, chain, eventually, read_back, running, store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VALUES = "cells => cells.map((cell) => Number(cell.value))"


def insight(daemon: Daemon) -> dict[str, Any]:
    return Raw(daemon.tcp_port).request("GET", "/v1/insight")[1]


@pytest.fixture(scope="module")
def told(daemon: Daemon) -> Daemon:
    """The daemon that has worked, and has been told of audits."""
    results = {"audits": [AUDIT.to_dict(), CORRUPT.to_dict()]}
    assert Raw(daemon.tcp_port).json("POST", "/v1/insight/audits", results) == (200, {"accepted": 2})
    return daemon


def test_what_was_lost_is_what_insight_says(browser: Browser, told: Daemon) -> None:
    with opened(browser, told.tcp_url) as page:
        found: dict[str, Any] = {}

        def agree() -> bool:
            found.update(insight(told))
            rows = page.locator("#causes tbody tr")
            lost = rows.locator("td:nth-child(2) data").evaluate_all(VALUES)
            return bool(lost) and lost == sorted(found["lost_tokens"].values(), reverse=True)

        eventually(agree)
        assert {"new", "diverged"} & found["lost_tokens"].keys()
        served = sum(found["hit_tokens"].values())
        assert f"{100 * served / found['requested_tokens']:.1f} %" in page.inner_text("#causes dl")
        templates = page.locator("#templates tbody tr")
        names = templates.locator("th").all_inner_texts()
        assert all(any(template["id"] in name for name in names) for template in found["templates"])
        asked = sum(templates.locator("td:nth-child(4) data").evaluate_all(VALUES))
        assert asked == found["requests"]


def test_a_window_can_be_chosen(browser: Browser, told: Daemon) -> None:
    with opened(browser, told.tcp_url) as page:
        page.wait_for_selector("#templates tbody tr")
        page.select_option("#window", "3600")
        page.wait_for_selector("#causes .quiet:has-text('Counted since')")
        lost = page.locator("#causes tbody td:nth-child(2) data").evaluate_all(VALUES)
        window = Raw(told.tcp_port).request("GET", "/v1/insight?window=3600")[1]
        assert sum(lost) <= sum(window["lost_tokens"].values())
        assert page.locator("#templates tbody tr").count() == len(insight(told)["templates"]) + bool(
            insight(told)["rest"]["requests"]
        )
        page.select_option("#window", "")
        page.wait_for_selector("#causes .quiet:has-text('Counted since')", state="detached")


def test_estimates_are_drawn_and_written(browser: Browser, told: Daemon) -> None:
    with opened(browser, told.tcp_url) as page:
        page.wait_for_selector("#room polyline.curve", state="attached")
        rates = insight(told)["whatif"]["rates"]
        shown = page.locator("#room tbody data").evaluate_all(VALUES)
        assert shown == [rate["hit_rate"] for rate in rates]
        assert page.locator("#room polyline").count() == 3
        assert page.locator("#room tbody th").all_inner_texts() == ["hot", "warm", "cold, with memory"]


def test_audits_that_failed_stand_out(browser: Browser, told: Daemon) -> None:
    with opened(browser, told.tcp_url) as page:
        page.wait_for_selector("#audits tbody tr")
        row = page.locator("#audits tbody tr", has_text="default").first
        assert row.locator("data").evaluate_all(VALUES)[:4] == [1, 0, 1, 256]
        assert row.locator(".bad").inner_text() == "1"
        assert "block 2, layer 0, V" in page.inner_text("#audits")


def regretted(page: Page) -> list[float]:
    numbers: list[float] = page.locator("#regret tbody tr", has_text="night, warm").locator("data").evaluate_all(VALUES)
    return numbers


def test_regret_is_shown_by_tier_and_time(browser: Browser) -> None:
    settings = {"warm": {"capacity": "1MiB"}}
    with running(settings) as daemon, opened(browser, daemon.tcp_url) as page, daemon.connect("night") as cache:
        page.wait_for_selector("#regret .quiet:has-text('wanted again')")
        store(cache, chain(100))
        for seed in (1, 2):
            store(cache, chain(100, seed=seed))
        hit = read_back(cache, chain(100))
        eventually(lambda: regretted(page)[:3] == [(100 - hit) * 16] * 3)
        assert "There is no shared tier." in page.inner_text("#shared")
        assert "No engine has told of an audit." in page.inner_text("#audits")


def test_a_daemon_that_does_not_look_says_so(browser: Browser) -> None:
    settings = {**TIERS, "insight": {"enabled": False}}
    with running(settings) as daemon, opened(browser, daemon.tcp_url) as page:
        page.wait_for_selector("#causes .quiet:has-text('insight.enabled is false')")
        with daemon.connect() as cache:
            store(cache, chain(3))
        assert page.locator("#templates").inner_text() == ""


def test_it_lives_while_the_daemon_works(browser: Browser, told: Daemon) -> None:
    with opened(browser, told.tcp_url) as page:
        page.wait_for_selector("#causes tbody tr")
        before = insight(told)["requests"]
        with working(told):
            eventually(lambda: insight(told)["requests"] > before + 5)
        shown = page.locator("#templates tbody tr td:nth-child(4) data")
        eventually(lambda: sum(shown.evaluate_all(VALUES)) > before)
        assert {"chat", "code"} <= set(page.locator("#templates tbody td:nth-child(2)").all_inner_texts())


@pytest.mark.parametrize(("size", "scheme"), [(LAPTOP, "light"), (PHONE, "dark")], ids=["laptop", "phone"])
def test_everybody_can_read_it(browser: Browser, told: Daemon, size: tuple[int, int], scheme: Scheme) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core: axe-playwright-python").Axe()
    with opened(browser, told.tcp_url, size, scheme) as page:
        for place in ("causes", "templates", "room", "audits"):
            page.wait_for_selector(f"#{place} tbody tr", state="attached")
        found = axe.run(page).response["violations"]
        assert [(fault["id"], fault["impact"], fault["nodes"][0]["html"]) for fault in found] == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.skipif(bool(MISSING_REDIS), reason=MISSING_REDIS)
def test_the_shared_tier_is_shown_at_work_and_away(browser: Browser, tmp_path: Path) -> None:
    """One daemon has stored, another gets it from the engine that both share, then that is gone."""
    server = RedisServer(tmp_path, "--maxmemory", "64mb")
    shared = {"url": server.url, "write": "all"}
    prompt = chain(8)
    try:
        with node("a", [], shared=shared) as one, node("b", [], shared=shared) as other:
            with one.start().connect() as cache:
                store(cache, prompt)
                cache.flush()
            with other.start().connect() as cache:
                eventually(lambda: read_back(cache, prompt) == 8)
            with opened(browser, other.tcp_url) as page:
                page.wait_for_selector("#shared .quiet:has-text('answers')")
                shown: dict[str, float] = {}

                def agree() -> bool:
                    stats = Raw(other.tcp_port).request("GET", "/v1/stats")[1]
                    shown.update((path, float(value)) for path, value in page.evaluate(NUMBERS))
                    return bool(shown) and all(value == at(stats, path) for path, value in shown.items())

                eventually(agree)
                assert shown["counters.hit_tokens.shared"] == 8 * 16
                assert shown["shared.bytes_in"] > 0
                assert shown["counters.promoted_blocks.shared>warm"] == 8
                server.kill()
                with other.connect() as cache:
                    eventually(lambda: read_back(cache, chain(4, seed=5)) == 0 and _away(page))
                assert shown.keys() > {"shared.known_blocks", "shared.used_bytes"}
    finally:
        if server.running:
            server.kill()


def _away(page: Page) -> bool:
    return "not" in page.inner_text("#shared p.bad") if page.locator("#shared p.bad").count() else False
