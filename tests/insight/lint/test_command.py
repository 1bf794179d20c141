"""`tierkv lint` from the outside: outputs, exit codes, and what it does not show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.insight.lint import logs
from tests.insight.lint.sarif_schema import SARIF

ROOT = Path(__file__).parents[3]
SECRET = "swordfish"


def run(*options: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierkv.service", "lint", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "a log <b>.jsonl"
    rows = logs.uuid_first().rows[:80]
    for row in rows:
        row["messages"][0]["content"] = f"<script>{SECRET}</script>\x1b[31m " + row["messages"][0]["content"]
    path.write_text(logs.write(rows))
    return path


@pytest.fixture(scope="module")
def outputs(log: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    html, sarif = log.with_suffix(".html"), log.with_suffix(".sarif")
    done = run(log, "--json", "--html", html, "--sarif", sarif)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout), html.read_text(), json.loads(sarif.read_text())


def test_the_table_says_what_to_do_and_that_tokens_are_approximate(log: Path) -> None:
    done = run(log)
    assert done.returncode == 0, done.stderr
    assert "approximation" in done.stdout
    assert re.search(r"1\. high +request id, session id or counter in the system prompt", done.stdout)
    assert "Move the id or counter out of the system prompt to the end of the last message" in done.stdout
    assert "\x1b[31m" not in done.stdout


def test_json_has_what_the_table_has(outputs: tuple[dict[str, Any], str, dict[str, Any]]) -> None:
    report = outputs[0]
    (finding,) = report["findings"]
    assert finding["cause"] == "id-or-counter"
    assert finding["severity"] == "high"
    assert finding["lost_tokens"] / report["prompt_tokens"] == pytest.approx(finding["share"])
    assert report["hit_rate"] == report["hit_tokens"] / report["prompt_tokens"]
    assert report["exact"] is False


def test_html_is_one_file_that_fetches_nothing_and_runs_nothing(
    outputs: tuple[dict[str, Any], str, dict[str, Any]],
) -> None:
    page = outputs[1]
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not re.search(r"https?:|url\(|@import", page)
    assert f"&lt;script&gt;{SECRET}" in page


def test_sarif_has_the_standards_structure(outputs: tuple[dict[str, Any], str, dict[str, Any]]) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    sarif = outputs[2]
    jsonschema_rs.Draft202012Validator(SARIF, validate_formats=True).validate(sarif)
    (one,) = sarif["runs"]
    rules = one["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in one["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["kind"] == "fail" or result["level"] == "none"
    assert one["results"][0]["level"] == "error"
    assert one["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] > 1


def test_no_text_shows_none(log: Path, tmp_path: Path) -> None:
    html, sarif = tmp_path / "r.html", tmp_path / "r.sarif"
    shown = [run(log, "--no-text", "--html", html, "--sarif", sarif), run(log, "--no-text", "--json")]
    text = "".join([*(done.stdout for done in shown), html.read_text(), sarif.read_text()])
    words = set(json.loads(log.read_text().splitlines()[3])["messages"][0]["content"].split())
    assert SECRET not in text
    assert not {word for word in words if len(word) > 6 and word[:1].islower()} & set(re.findall(r"\w+", text)) - {
        "Request"
    }


def test_standard_input_is_a_log(log: Path) -> None:
    done = run("-", "--json", stdin=log.read_bytes())
    report = json.loads(done.stdout)
    assert (report["log"], report["requests"], len(report["findings"])) == ("<stdin>", 80, 1)


@pytest.mark.parametrize(("level", "code"), [("high", 1), ("info", 1), (None, 0)])
def test_fail_on_decides_the_exit_code(log: Path, level: str | None, code: int) -> None:
    assert run(log, *(() if level is None else ("--fail-on", level))).returncode == code


def test_fail_on_leaves_harmless_patterns_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(logs.write(logs.clean_retrieval().rows[:60]))
    assert run(path, "--fail-on", "low").returncode == 0


def test_a_baseline_lets_known_findings_pass_until_they_grow(log: Path, tmp_path: Path) -> None:
    known = run(log, "--json").stdout
    baseline = tmp_path / "baseline.json"
    baseline.write_text(known)
    done = run(log, "--fail-on", "low", "--baseline", baseline, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["findings"][0]["known"] is True
    smaller = json.loads(known)
    smaller["findings"][0]["share"] = 0.3
    baseline.write_text(json.dumps(smaller))
    assert run(log, "--fail-on", "low", "--baseline", baseline).returncode == 1


def test_fix_writes_the_log_and_measures_it(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "fixed.jsonl"
    report = json.loads(run(log, "--fix", out, "--json").stdout)
    again = json.loads(run(out, "--json").stdout)
    assert report["fixed"]["hit_rate"] == again["hit_rate"] > 0.8 > report["hit_rate"]
    before, after = (json.loads(path.read_text().splitlines()[5]) for path in (log, out))
    identifier = re.search(r"Request (\S{36})\.", before["messages"][0]["content"])
    assert identifier is not None
    assert identifier[1] not in after["messages"][0]["content"]
    assert after["messages"][1]["content"].endswith(identifier[1])
    assert after["messages"][1]["content"].startswith(before["messages"][1]["content"])
    assert again["findings"] == []


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("missing.jsonl",), "cannot read missing.jsonl", 5),
        (("-", "--format", "xml"), "no format 'xml'", 2),
        (("-", "--fail-on", "always"), "no severity 'always'", 2),
        (("-", "--block-tokens", "0"), "blocks of 0 tokens", 2),
        (("-", "--capacity-tokens", "4"), "holds no block of 16", 2),
        (("-", "--baseline", "missing.json"), "cannot read missing.json", 2),
        (("-", "--format", "tokens", "--fix", "x"), "cannot be rewritten", 2),
        (("-", "--format", "openai"), "<stdin>:1: no list 'messages'", 2),
    ],
)
def test_mistakes_are_named_with_a_remedy(options: tuple[str, ...], message: str, code: int) -> None:
    done = run(*options, stdin=b"[1]\n")
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "remedy: " in done.stderr


def test_the_log_itself_is_not_overwritten(log: Path) -> None:
    before = log.read_bytes()
    assert run(log, "--fix", log).returncode == 2
    assert log.read_bytes() == before


def test_skipped_lines_are_counted(log: Path) -> None:
    done = run("-", "--skip-bad", stdin=log.read_bytes() + b"{broken\n")
    assert done.returncode == 0
    assert "1 lines left out, the first: <stdin>:81: not JSON" in done.stdout


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, tierkv.insight.lint.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "tokenizers", "aiohttp", "pydantic"} & set(done.stdout.split())
