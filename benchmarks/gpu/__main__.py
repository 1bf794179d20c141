"""Test, measure, print one table. Ends with 0 when all is well, 1 when a test or a part failed, 2 without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.errors import DeviceError

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Figure, Machine, Scale

LIMIT_S = 480.0
_CHECKS_S = 240.0


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="which GPU")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--seconds-per-case", type=float, default=1.0, help="how long each case is repeated")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Run all of it."""
    arguments = _arguments(given)
    began = time.monotonic()
    try:
        from benchmarks.gpu.machine import Machine, Scale

        machine = Machine(arguments.device, arguments.seconds_per_case)
    except (DeviceError, ImportError) as error:
        print(f"nothing to measure on: {error}", file=sys.stderr)
        return 2
    checked = True
    if not arguments.skip_tests:
        from benchmarks.gpu.checks import run_checks

        checked = run_checks(_CHECKS_S)
    return 0 if measure(machine, Scale(), arguments.json, began + LIMIT_S) and checked else 1


def measure(machine: Machine, scale: Scale, target: Path | None, until: float) -> bool:
    """Measure every part and print its figures as they come; say whether all parts could be.

    A part that fails is reported, and the next one begins: a run on a GPU is too dear to be lost to one of them. None
    begins after `until`, on the monotonic clock.
    """
    from benchmarks.gpu.kernels import kernel_figures
    from benchmarks.gpu.overlap import overlap_figures
    from benchmarks.gpu.promotion import promotion_figures
    from benchmarks.gpu.transfers import pool_figures, process_figures

    print(machine.describe(), flush=True)
    print(f"{'':12}{'':44}{'':>10} {'':9} {'ratio':>6} {'target':>6}")
    parts = (kernel_figures, pool_figures, process_figures, overlap_figures, promotion_figures)
    found, failed = [], []
    for part in parts:
        if time.monotonic() > until:
            failed.append(part.__name__)
            print(f"no time is left for {part.__name__}", flush=True)
            continue
        try:
            for figure in part(machine, scale):
                found.append(figure)
                print(_line(figure), flush=True)
        except Exception:
            failed.append(part.__name__)
            print(f"{part.__name__} failed:\n{traceback.format_exc()}", flush=True)
    short = [figure.name for figure in found if figure.verdict == "short"]
    print(f"{len(found)} figures, {len(short)} short of their target, {len(failed)} parts failed")
    if target is not None:
        figures = [asdict(figure) | {"verdict": figure.verdict} for figure in found]
        text = json.dumps({"machine": machine.describe(), "figures": figures, "failed": failed}, indent=2)
        target.write_text(text + "\n")
    return not failed


def _line(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    target = "" if figure.target is None else f"{figure.target:g}"
    return (
        f"{figure.part:12}{figure.name:44}{figure.value:10.4g} {figure.unit:9} {ratio:>6} {target:>6} "
        f"{figure.verdict:5} {figure.note}".rstrip()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
