"""The dashboard's files: whole, small, from nowhere else, and safe to open."""

import re
from pathlib import Path

import pytest

from tests.service.daemon import ROOT, Raw

PARTS = sorted(path.name for path in (ROOT / "service" / "page").iterdir() if path.suffix in (".css", ".html", ".js"))
MOST_BYTES = 60_000


def text(raw: Raw, path: str) -> str:
    status, answer, _ = raw.request("GET", path)
    assert status == 200
    return bytes(answer["raw"]).decode()


def test_everything_the_page_names_is_served_and_nothing_is_spare(raw: Raw) -> None:
    named = {name for part in PARTS for name in re.findall(r'(?:/page/|from "\./)([\w.]+)', text(raw, f"/page/{part}"))}
    assert named | {"index.html"} == set(PARTS)


def test_the_page_is_small(raw: Raw) -> None:
    assert sum(len(text(raw, f"/page/{part}")) for part in PARTS) < MOST_BYTES


def test_nothing_comes_from_elsewhere(raw: Raw) -> None:
    for part in PARTS:
        assert not set(re.findall(r"https?://[^\"' ]+", text(raw, f"/page/{part}"))) - {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
def test_browsers_are_told_to_be_strict(raw: Raw, path: str) -> None:
    headers = raw.request("GET", path)[2].headers
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_other_sites_and_other_names_get_nothing(raw: Raw) -> None:
    for path in ("/", "/page/page.js", "/v1/events"):
        assert raw.request("GET", path, headers={"Host": "rebound.example:80"})[0] == 400
        assert raw.request("GET", path, headers={"Origin": "https://elsewhere.example"})[0] == 400


@pytest.mark.parametrize("part", ["__init__.py", "..%2fapp.py", "page.mjs", ""])
def test_other_files_are_not_served(raw: Raw, part: str) -> None:
    assert raw.request("GET", f"/page/{part}")[0] == 404


def test_the_files_are_those_of_the_package(raw: Raw) -> None:
    for part in PARTS:
        assert text(raw, f"/page/{part}") == Path(ROOT / "service" / "page" / part).read_text()
    assert text(raw, "/") == text(raw, "/page/index.html")
