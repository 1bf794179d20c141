"""`tierkv audit`: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.insight.audit.test_result import BAD, OK
from tests.service.cli import Command, command
from tierkv.insight.audit.report import write_result


@pytest.fixture
def tierkv_audit(capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with command(capfd) as run:
        yield lambda *arguments: run("audit", *arguments)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    for _ in range(3):
        write_result(path, OK)
    return path


@pytest.fixture
def bad(good: Path) -> Path:
    write_result(good, BAD)
    write_result(good, replace(OK, verdict="outside", reason="logits"))
    return good


def test_a_clean_report_ends_with_0(tierkv_audit: Command, good: Path) -> None:
    code, out, err = tierkv_audit(good)
    assert (code, err) == (0, "")
    assert "3 audits: 3 ok, 0 outside, 0 corrupt" in out
    assert "envelope 3" in out


def test_a_report_names_the_place_and_ends_with_1(tierkv_audit: Command, bad: Path) -> None:
    code, out, _ = tierkv_audit("report", bad)
    assert code == 1
    text = " ".join(out.split())
    assert "5 audits: 3 ok, 1 outside, 1 corrupt" in text
    assert "corrupt: V of layer 4, first at token 17 in block 1 (cdcdcdcdcdcdcdcd)" in text
    assert "outside: the same KV led to other logits (logits)" in text


def test_json_has_the_same(tierkv_audit: Command, bad: Path) -> None:
    code, out, _ = tierkv_audit(bad, "--json")
    report = json.loads(out)
    assert code == 1
    assert report["audits"] == {"ok": 3, "outside": 1, "corrupt": 1}
    assert report["layers"] == [
        {
            "layer": 0,
            "plane": "K",
            "differing": 15,
            "max_difference": 0.5,
            "relative_error": 0.01,
            "of_limit": 0.5,
            "ulps": [25, 10, 5],
        }
    ]


def test_nothing_audited_proves_nothing(tierkv_audit: Command, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    code, out, _ = tierkv_audit(path)
    assert (code, out.splitlines()[0]) == (1, "0 audits: 0 ok, 0 outside, 0 corrupt")
    assert "nothing was audited" in out


@pytest.mark.parametrize("line", ["no json", '{"verdict": "ok"}', "[]"])
def test_a_broken_line_is_named(tierkv_audit: Command, good: Path, line: str) -> None:
    with good.open("a") as file:
        file.write(f"\n{line}\n")
    code, _, err = tierkv_audit(good)
    assert code == 2
    assert f"{good}, line 5" in err


def test_a_file_that_is_not_there(tierkv_audit: Command, tmp_path: Path) -> None:
    code, _, err = tierkv_audit(tmp_path / "none.jsonl")
    assert code == 5
    assert "none.jsonl" in err


@pytest.mark.parametrize("line", ['{"prompt": ""}', '{"tokens": []}', '{"tokens": [-1]}', '{"tokens": [true]}', "[1]"])
def test_prompts_are_checked(tierkv_audit: Command, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    code, _, err = tierkv_audit("vllm", "--url", "http://127.0.0.1:1", "--prompts", path)
    assert code == 2
    assert f"{path}, line 2" in err


def test_a_model_is_audited_through_the_disk(tierkv_audit: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.engines import tiny

    tiny.llama(tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"tokens": tiny.prompt(70, seed=seed)}) + "\n" for seed in range(2)))
    given = ("--model", tmp_path / "model", "--prompts", prompts, "--block-tokens", 16)
    code, said, err = tierkv_audit("run", *given, "--out", out, "--json")
    assert code == 0, err
    report = json.loads(said)
    assert report["audits"] == {"ok": 2, "outside": 0, "corrupt": 0}
    assert report["tokens"] == 2 * 64
    assert len(out.read_text().splitlines()) == 2
    assert tierkv_audit(out)[0] == 0
    code, said, _ = tierkv_audit("run", *given, "--lossy", "eq3", "--rounds", 2, "--json")
    assert sum(json.loads(said)["audits"].values()) == 4
    assert any(layer["differing"] for layer in json.loads(said)["layers"])


def test_a_model_that_is_not_there(tierkv_audit: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, _, err = tierkv_audit("run", "--model", tmp_path)
    assert code == 2
    assert str(tmp_path) in err
