"""Compile all cases; print what was found as JSON, or write it into docs/kernels.md."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import triton

from tests.kernels.aot.case import Found
from tests.kernels.aot.cases import all_cases
from tests.kernels.aot.compiling import compile_case

ARCHITECTURES = (80, 90, 100)
DOCUMENT = Path(__file__).parents[3] / "docs/kernels.md"
BEGIN, END = "<!-- python -m tests.kernels.aot --document -->\n", "<!-- end of what it writes -->\n"
BANDWIDTH = 4.3e12  # bytes per second that a copy kernel reaches on an H200, of 4.8e12 nominal


def bits(widths: dict[int, int]) -> str:
    return ", ".join(str(width) for width in sorted(widths)) or "none"


def table(found: list[Found]) -> str:
    """Lay out what was found as a table: one line per case and kernel, with the most that any architecture needs."""
    lines = [
        f"Written by Triton {triton.__version__}; each figure is the same for, or the largest of, "
        f"{', '.join(f'sm_{sm}' for sm in ARCHITECTURES)}.",
        "",
        "| case | kernel | MB moved | time at 4.3 TB/s, us | loads, bits | stores, bits | registers | shared, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        groups.setdefault((one.case, one.kernel), []).append(one)
    for (case, kernel), same in groups.items():
        moved = same[0].moved
        loads = bits({width: 1 for one in same for width in one.loads})
        stores = bits({width: 1 for one in same for width in one.stores})
        lines.append(
            f"| {case} | `{kernel}` | {moved / 1e6:.1f} | {moved / BANDWIDTH * 1e6:.1f} | {loads} | {stores} "
            f"| {max(one.registers for one in same)} | {max(one.shared for one in same)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    found = [one for case in all_cases() for one in compile_case(case, ARCHITECTURES)]
    if sys.argv[1:] == ["--document"]:
        text = DOCUMENT.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}{table(found)}{END}{after}")
    else:
        json.dump([asdict(one) for one in found], sys.stdout)


if __name__ == "__main__":
    main()
