"""`python -m benchmarks.gpu` as far as it goes without a GPU: every figure is there, and what fails does not end it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import checks
from benchmarks.gpu.__main__ import main, measure
from benchmarks.gpu.machine import Figure, Machine, Scale, Work
from benchmarks.gpu.neighbour import answer
from tests.storage.fake_cuda import FakeDevice
from tests.storage.test_device_decode import merge_in_fake, sums_in_fake
from tierkv.errors import DeviceError
from tierkv.storage.device import DeviceBlock

TINY = Scale(
    layers=2,
    heads=2,
    dim=16,
    page_tokens=4,
    block_tokens=16,
    blocks=8,
    carried=4,
    prefill_tokens=64,
    prefill_flop=2 * 64 * 32 * 32,
    prefill_width=32,
)
ROOT = Path(__file__).parents[2]
NEIGHBOUR = (
    "import sys; from benchmarks.gpu.neighbour import answer; from tests.storage.fake_cuda import FakeDevice; "
    "print(answer(FakeDevice(), sys.stdin.readline(), for_s=0))"
)


class FakeMachine(Machine):
    """The stand-in for the runtime, the processor for kernels, and no time to lose."""

    def __init__(self) -> None:
        self.door = self.fake = FakeDevice()
        self.torch_device = torch.device("cpu")
        self.seconds_per_case = 0.0
        self.kept: list[torch.Tensor] = []
        self.merge = merge_in_fake
        self.sums = sums_in_fake

    def describe(self) -> str:
        return "no GPU"

    def tensor(self, block: DeviceBlock) -> torch.Tensor:
        memory = (ctypes.c_uint8 * block.nbytes).from_address(block.address)
        return torch.from_numpy(np.ctypeslib.as_array(memory))

    def pinned(self, nbytes: int) -> torch.Tensor:
        found = torch.zeros(nbytes, dtype=torch.uint8)
        self.kept.append(found)  # page-locked memory stays mapped
        self.fake.pin(found.data_ptr(), nbytes)
        return found

    def synchronize(self) -> None:
        pass

    def stream(self) -> Any:
        return torch.cpu.Stream()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cpu.stream(stream)

    def wait_for(self, stream: Any) -> None:
        pass

    def neighbour(self) -> list[str]:
        return [sys.executable, "-c", NEIGHBOUR]

    def kernel_seconds(self, work: Work) -> float:
        return self.seconds(work)


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine()
    yield machine
    assert machine.fake.faults == []


def test_every_figure_is_measured_and_nothing_is_left_behind(
    machine: FakeMachine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(machine, TINY, tmp_path / "out.json", time.monotonic() + 60), capsys.readouterr().out
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == []
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert len(figures) == len(found["figures"])
    assert all(name in printed for name in figures)
    parts = [figure["part"] for figure in found["figures"]]
    assert {part: parts.count(part) for part in parts} == {
        "kernels": 1 + 8 + 4 + 4 + 2,
        "bus": 1 + 4 + 3,
        "processes": 2,
        "overlap": 2,
        "promotion": 8,
    }
    for name, figure in figures.items():
        assert figure["value"] > 0 or figure["part"] == "overlap", name
        assert figure["ratio"] is None or figure["ratio"] > 0
        assert figure["verdict"] in ("met", "short") if figure["target"] is not None else figure["verdict"] == ""
    targets = [figure["target"] for figure in found["figures"] if figure["target"] is not None]
    assert sorted(targets) == [0.8] * 4 + [0.9] * 11 + [80.0] * 2
    assert machine.fake.unfinished == []
    mine = f"tierkv-{os.getuid()}-{os.getpid()}-"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(mine) and name.endswith(".bench")]


def test_a_part_that_fails_is_told_and_the_others_are_measured(
    machine: FakeMachine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "neighbour", lambda: [sys.executable, "-c", "raise SystemExit('no IPC here')"])
    assert not measure(machine, TINY, tmp_path / "out.json", time.monotonic() + 60)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == ["process_figures"]
    assert "no IPC here" in capsys.readouterr().out
    assert "promotion" in {figure["part"] for figure in found["figures"]}


def test_no_part_begins_when_time_is_up(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert not measure(machine, TINY, None, time.monotonic() - 1)
    assert capsys.readouterr().out.count("no time is left") == 5


def test_targets_are_met_or_not() -> None:
    assert Figure("a", "b", 10, "GB/s", 0.9, 0.9).verdict == "met"
    assert Figure("a", "b", 10, "GB/s", 0.89, 0.9).verdict == "short"
    assert Figure("a", "b", 79, "% hidden", None, 80).verdict == "short"
    assert Figure("a", "b", 10, "GB/s", 0.1).verdict == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--skip-tests"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("nothing to measure on: ")
    assert told.count("\n") == 1


def test_the_command_line_is_what_the_readme_says() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    documented = (ROOT / "benchmarks/README.md").read_text()
    for option in ("--json", "--seconds-per-case", "--skip-tests", "--device"):
        assert option in asked
        assert option in documented


def test_checks_pass_fail_and_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(body: str, limit_s: float = 60) -> bool:
        path = tmp_path / "test_it.py"
        path.write_text(f"import time\ndef test_it():\n    {body}\n")
        return checks.run_checks(limit_s, expression="not gpu", paths=(str(path),))

    assert run("pass")
    assert not run("assert 0")
    assert not run("time.sleep(60)", limit_s=0.01)
    assert "have not ended" in capfd.readouterr().out


def test_what_it_runs_first_is_there() -> None:
    assert all((ROOT / path).exists() for path in checks.PATHS)


def test_a_neighbour_that_cannot_attach_says_why() -> None:
    with pytest.raises(DeviceError, match="another process"):
        answer(FakeDevice(), json.dumps({"handle": b"/nowhere 4096".hex(), "nbytes": 4096}))
