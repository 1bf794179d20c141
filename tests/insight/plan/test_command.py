"""`tierkv plan` from the outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.replay import simulators as slow
from tierkv.errors import ConfigError, TierKVError
from tierkv.insight.plan.command import Asked, block_size, parse_sizes, plan_command
from tierkv.insight.plan.question import Speeds

ROOT = Path(__file__).parents[3]
TRACE = slow.generated_trace(2)
SMALL = ("--block-tokens", "4", "--block-bytes", "1024", "--ram", "10KiB,20KiB,40KiB", "--disk", "0,80KiB")


def tierkv_plan(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierkv.service", "plan", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat <1>.jsonl"
    with path.open("w") as file:
        for request in TRACE.requests:
            row = {"timestamp": request.timestamp, "input_length": request.tokens, "hash_ids": request.blocks}
            file.write(json.dumps(row) + "\n")
    return path


def test_json_has_every_point(trace: Path) -> None:
    done = tierkv_plan(trace, *SMALL, "--policy", "lru,slru", "--gpu-hour", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["samples"] == 4
    assert answer["baseline"]["requests"] == len(TRACE.requests)
    points = answer["points"]
    assert len(points) == 2 * 2 * 3
    assert {(point["policy"], point["ram_bytes"], point["disk_bytes"]) for point in points} == {
        (policy, ram * 1024, disk * 1024) for policy in ("lru", "slru") for ram in (10, 20, 40) for disk in (0, 80)
    }
    alone = next(point for point in points if (point["policy"], point["ram_bytes"]) == ("lru", 40 * 1024))
    assert alone["hit_rate"]["value"] == pytest.approx(slow.slow_lru(TRACE, 40) / TRACE.prompt_tokens())
    assert alone["cost_per_hour"]["value"] > 0


def test_the_table_has_the_same_figures(trace: Path) -> None:
    table = tierkv_plan(trace, *SMALL, "--policy", "lru", "--exact")
    answer = json.loads(tierkv_plan(trace, *SMALL, "--policy", "lru", "--exact", "--json").stdout)
    assert table.returncode == 0, table.stderr
    assert answer["samples"] == 0
    for point in answer["points"]:
        assert f"{point['hit_rate']['value']:.3f}" in table.stdout
        assert f"{point['ttft_mean_s']['value']:.3f}" in table.stdout
    assert "lru, 80 KiB of disk" in table.stdout


class Page(HTMLParser):
    """Collects what a page loads, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "data", "srcset") and value and not value.startswith("#")
        ]


def test_the_page_needs_nothing_else(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.html"
    done = tierkv_plan(trace, *SMALL, "--policy", "lru,slru", "--gpu-hour", "2", "--html", path)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    page = Page(text)
    assert page.loads == []
    assert "script" not in page.tags
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.tags.count("figure") == 3
    assert page.tags.count("tr") == 1 + 12
    assert "chat &lt;1&gt;.jsonl" in text
    assert "<1>" not in text


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--ram", "much"), "--ram"), (("--html", "/no/such/folder/plan.html"), "/no/such/folder/plan.html")],
)
def test_mistakes_end_with_a_remedy(trace: Path, options: tuple[str, ...], named: str) -> None:
    done = tierkv_plan(trace, "--block-tokens", "4", "--block-bytes", "9", "--samples", "1", *options)
    assert done.returncode not in (0, 1), done.stdout
    assert named in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ram": "0"}, "--ram"),
        ({"disk": "1GiB,-3"}, "--disk"),
        ({"policies": ("lfu",)}, "lfu"),
        ({"ram": "64GiB", "disk": "1GiB"}, "disk"),
    ],
)
def test_impossible_questions_are_refused(trace: Path, changes: dict[str, Any], named: str) -> None:
    asked = replace(Asked(("lru",), None, None, Speeds(8000, 20e9, 2e9), 0.25, None, 1), **changes)
    with pytest.raises(ConfigError, match=named) as caught:
        plan_command(trace, 4, 1024, asked, page=None, as_json=True)
    assert caught.value.remedy


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    asked = Asked(("lru",), None, None, Speeds(8000, 20e9, 2e9), 0.25, None, 1)
    with pytest.raises(TierKVError, match="no requests in it"):
        plan_command(empty, 4, 1024, asked, page=None, as_json=True)


def test_the_size_of_a_block_is_given_once() -> None:
    with pytest.raises(ConfigError, match="--bytes-per-token and --model"):
        block_size(4, block_bytes=None, bytes_per_token=5, model=Path("somewhere"))
    with pytest.raises(TierKVError, match="no/such/checkpoint"):
        block_size(4, block_bytes=None, bytes_per_token=None, model=Path("no/such/checkpoint"))


def test_sizes_and_blocks() -> None:
    assert parse_sizes("0, 64GiB,1TB", "--disk") == (0, 64 << 30, 10**12)
    assert block_size(512, block_bytes=None, bytes_per_token=None, model=None) == 512 * 131_072
    assert block_size(512, block_bytes=None, bytes_per_token=10, model=None) == 5120
    assert block_size(512, block_bytes=7, bytes_per_token=None, model=None) == 7


def test_a_checkpoint_says_how_large_a_block_is(tmp_path: Path) -> None:
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "head_dim": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    header = b"{}      "
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert block_size(16, block_bytes=None, bytes_per_token=None, model=tmp_path) == 3 * 2 * 2 * 32 * 16 * 2


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, tierkv.insight.plan.command, tierkv.insight.whatif; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "pydantic", "aiohttp"} & set(done.stdout.split())
