"""How long `tierkv lint` takes for a log of token ids, and how much memory.

    python benchmarks/lint_scale.py
    python benchmarks/lint_scale.py --requests 10000 --tokens 4000

The log is written first, as one .npy file: 40 applications with prompts of their own, of different length; in half of
them a value that changes stands near the start, in a quarter the parts come in changing order; a question of its own
ends each prompt. The analysis is a process of its own. The machine's raw speed stands beside it: reading the file, and
hashing it with XXH3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

APPLICATIONS = 40
PARTS = 10
ROWS = 500


def write_log(path: Path, requests: int, tokens: int) -> None:
    """Write a log, some rows at a time."""
    rng = np.random.default_rng(1)
    log = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=(requests, tokens))
    prompts = rng.integers(0, 128_000, (APPLICATIONS, tokens), dtype=np.uint32)
    shares = rng.uniform(0.6, 0.95, APPLICATIONS)
    for first in range(0, requests, ROWS):
        count = min(ROWS, requests - first)
        rows = rng.integers(0, 128_000, (count, tokens), dtype=np.uint32)
        for row, application in zip(rows, rng.integers(0, APPLICATIONS, count).tolist(), strict=True):
            shared = int(shares[application] * tokens) // PARTS * PARTS
            prompt = prompts[application, :shared]
            if application % 4 == 1:
                prompt = prompt.reshape(PARTS, -1)[rng.permutation(PARTS)].reshape(-1)
            changing = row[200:212].copy() if application % 2 == 0 else None
            row[:shared] = prompt
            if changing is not None:
                row[200:212] = changing
        log[first : first + count] = rows
    log.flush()


def analyse(path: Path) -> None:
    """Run the analysis and print its figures and this process's peak memory as JSON."""
    from tierkv.insight.lint.command import lint_log
    from tierkv.insight.lint.readers.log import open_log

    start = time.perf_counter()
    with open_log(path) as log:
        report = lint_log(log)
    seconds, processor = time.perf_counter() - start, time.process_time()
    # Not getrusage: that also counts what the process was before it became this program.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    findings = [[finding.cause, finding.lost_tokens] for finding in report.findings]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "processor": processor,
                "peak": peak,
                "hit_rate": report.hit_rate,
                "findings": findings,
            }
        )
    )


def read_speed(path: Path) -> tuple[float, float]:
    """Return the seconds that reading the file takes, and reading and hashing it."""
    times = []
    for use in (len, xxhash.xxh3_64_intdigest):
        start = time.perf_counter()
        with path.open("rb") as file:
            while data := file.read(4 << 20):
                use(data)
        times.append(time.perf_counter() - start)
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure `tierkv lint` on a large log of token ids.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=8_000, help="of each request")
    parser.add_argument("--directory", type=Path, default=None, help="where the log goes: 4 bytes a token")
    parser.add_argument("--analyse", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.analyse is not None:
        analyse(options.analyse)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "log.npy"
        write_log(path, options.requests, options.tokens)
        reading, hashing = read_speed(path)
        command = [sys.executable, __file__, "--analyse", str(path)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    table = Table(title=f"tierkv lint: {options.requests:,} requests of {options.tokens:,} tokens")
    for heading in ("", "seconds", "of them on a core", "peak GiB"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("lint", f"{figures['seconds']:.1f}", f"{figures['processor']:.1f}", f"{figures['peak'] / 2**30:.2f}")
    table.add_row("reading the file", f"{reading:.1f}", "", "")
    table.add_row("reading and XXH3", f"{hashing:.1f}", "", "")
    Console().print(table)
    Console().print(f"hit rate {figures['hit_rate']:.3f}; tokens lost by cause: {figures['findings'][:4]}")


if __name__ == "__main__":
    main()
