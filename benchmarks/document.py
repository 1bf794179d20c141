"""Run the benchmarks again and put what they print into docs/benchmarks.md.

    python benchmarks/document.py                   all of them; about eight minutes
    python benchmarks/document.py storage codec     some

Each output stands in the page in a fenced block after a comment `<!-- output: NAME -->`. Everything between the fences
is replaced; the text around it is written by hand, so read it again afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
WIDTH = 100
TIERKV = (sys.executable, "-m", "tierkv.service")
RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "storage": ((*TIERKV, "bench", "storage"),),
    "codec": (
        (sys.executable, "benchmarks/dump_kv.py", "{scratch}/smollm2.npy"),
        (*TIERKV, "bench", "codec", "--input", "{scratch}/smollm2.npy"),
    ),
    "wire": ((*TIERKV, "bench", "wire"),),
    "layouts": ((sys.executable, "benchmarks/lmdb_layouts.py"),),
}


def output(name: str) -> str:
    """Run the commands of a benchmark; return what the last one prints. Raises `CalledProcessError`."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = ""
    with tempfile.TemporaryDirectory() as scratch:
        for command in RUNS[name]:
            filled = [part.format(scratch=scratch) for part in command]
            done = subprocess.run(filled, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            printed = done.stdout.replace(f"{scratch}/", "")
    lines = (line.rstrip() for line in printed.splitlines())
    return f"{date.today()}\n" + "\n".join(line for line in lines if line)


def filled_in(page: str, name: str, text: str) -> str:
    """Return the page with the fenced block of `name` holding `text`."""
    block = re.compile(rf"(<!-- output: {name} -->\n+```text\n).*?(\n```)", re.DOTALL)
    changed, places = block.subn(lambda found: found[1] + text + found[2], page)
    if places != 1:
        raise SystemExit(f"{PAGE} has {places} places for the output {name}")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks again and update docs/benchmarks.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all by default")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    for name in options.names or RUNS:
        print(f"{name} ...", flush=True)
        PAGE.write_text(filled_in(PAGE.read_text(), name, output(name)))


if __name__ == "__main__":
    main()
