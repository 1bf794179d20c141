"""The results of many audits, for a terminal and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from tierkv.errors import InvalidRequest, StorageError
from tierkv.insight.audit.log import AuditLog
from tierkv.insight.audit.result import AuditResult

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["exit_code", "print_report", "read_results", "report_dict", "write_result"]

_FINDINGS = 20


def read_results(path: Path) -> list[AuditResult]:
    """Read a file that `write_result` has written.

    Raises
    ------
    StorageError
        It cannot be read.
    InvalidRequest
        It is not text, or a line is not the result of an audit; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path}: not UTF-8 at byte {error.start}", remedy="name a file that tierkv audit wrote"
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", remedy="name a file that tierkv audit wrote"
        ) from error
    results = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            results.append(AuditResult.from_dict(json.loads(line)))
        except ValueError as error:
            message = error.message if isinstance(error, InvalidRequest) else f"not JSON: {error}"
            raise InvalidRequest(
                f"{path}, line {number}: {message}", remedy="remove the line, or audit again"
            ) from error
    return results


def write_result(path: Path, result: AuditResult) -> None:
    """Append a result as one line of JSON. Raises `StorageError`."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.to_dict(), allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", remedy="choose another file") from error


def exit_code(results: Sequence[AuditResult], log: AuditLog | None = None) -> int:
    """Return 0 if something was audited, all of it was ok and no audit failed, else 1."""
    failed = log is not None and log.skipped.get("failed")
    return 0 if results and not failed and all(result.verdict == "ok" for result in results) else 1


def report_dict(results: Sequence[AuditResult], log: AuditLog | None = None) -> dict[str, Any]:
    """Return what a program wants to know, for strict JSON.

    `AuditLog.to_dict`, and in ``layers`` for K and V of each layer the worst ``max_difference``, ``relative_error`` and
    ``of_limit`` of all audits, and the sums of ``differing`` values and of ULP histograms. `log` has what was skipped,
    if that is known.
    """
    summary = _counted(results).to_dict()
    if log is not None:
        summary["skipped"] = log.skipped
    return {**summary, "layers": [_plain(row) for row in _layers(results)]}


def print_report(results: Sequence[AuditResult], console: Console, log: AuditLog | None = None) -> None:
    """Print what a person wants to know: the score, K and V by layer, and where it went wrong."""
    counted = _counted(results).to_dict()
    skipped = log.skipped if log is not None else {}
    said = [f"{count} {verdict}" for verdict, count in counted["audits"].items()]
    said += [f"{count} skipped ({reason})" for reason, count in skipped.items()]
    console.print(f"{len(results)} audits: {', '.join(said)}")
    if not results:
        console.print("nothing was audited, so nothing is proved")
        return
    console.print(f"{counted['tokens']:,} served tokens computed again in {counted['seconds']:.1f} s")
    bases = {basis: sum(result.basis == basis for result in results) for basis in ("exact", "envelope", "budget")}
    console.print("held against: " + ", ".join(f"{name} {count}" for name, count in bases.items() if count))
    rows = _layers(results)
    if any(row["differing"] for row in rows):
        console.print(_layer_table(rows))
    elif rows:
        console.print(f"K and V of {len({row['layer'] for row in rows})} layers agree to the bit")
    console.print(_logits_line(results))
    wrong = [result for result in results if result.verdict != "ok"]
    for result in wrong[:_FINDINGS]:
        console.print(f"[bold red]{result.verdict}[/]: {_where(result)}", highlight=False)
    if len(wrong) > _FINDINGS:
        console.print(f"and {len(wrong) - _FINDINGS} more")


def _where(result: AuditResult) -> str:
    finding = result.finding
    if finding is not None:
        return (
            f"{finding.plane} of layer {finding.layer}, first at token {finding.token} in block {finding.block} "
            f"({finding.block_hash[:16]}): off by {finding.difference:.3g} where {finding.limit:.3g} is allowed, "
            f"in {finding.positions} of {result.tokens} tokens ({result.reason})"
        )
    if result.answer_token is not None:
        return f"token {result.answer_token} of the answer differs ({result.reason})"
    return f"the same KV led to other logits ({result.reason})" if result.planes else result.reason


def _logits_line(results: Sequence[AuditResult]) -> str:
    held = [result.logits for result in results if result.logits is not None]
    if not held:
        return "no logits were compared"
    other = sum(not logits.same_token for logits in held)
    ties = sum(not logits.same_token and logits.near_tie for logits in held)
    divergences = [logits.kl for logits in held if logits.kl is not None]
    line = f"logits: off by {max(logits.max_difference for logits in held):.3g} at most"
    if divergences:
        line += f", KL {sum(divergences) / len(divergences):.2g} nats on average and {max(divergences):.2g} at most"
    return f"{line}; the choice differed {other} times, {ties} of them near-ties"


def _layer_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "", "off by", "of limit", "equal", "1 ULP", "2-7", "8 or more"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in rows:
        histogram, total = row["ulps"], sum(row["ulps"])
        parts = (histogram[:1], histogram[1:2], histogram[2:4], histogram[4:])
        shares = [f"{sum(part) / total:.1%}" for part in parts]
        table.add_row(
            str(row["layer"]), row["plane"], f"{row['max_difference']:.2g}", f"{row['of_limit']:.2f}", *shares
        )
    return table


def _layers(results: Sequence[AuditResult]) -> list[dict[str, Any]]:
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for result in results:
        for part in result.planes:
            row = rows.setdefault(
                (part.layer, part.plane),
                {"layer": part.layer, "plane": part.plane, "differing": 0, **dict.fromkeys(_WORST, 0.0), "ulps": []},
            )
            shown = part.relative_error if result.basis == "budget" else part.max_difference
            reached = shown / part.limit if part.limit else float("inf") if part.differing else 0.0
            for name, value in zip(_WORST, (part.max_difference, part.relative_error, reached), strict=True):
                row[name] = max(row[name], value)
            row["differing"] += part.differing
            longer = max(len(row["ulps"]), len(part.ulps))
            padded = [[*counts, *[0] * (longer - len(counts))] for counts in (row["ulps"], part.ulps)]
            row["ulps"] = [a + b for a, b in zip(*padded, strict=True)]
    return [rows[key] for key in sorted(rows)]


_WORST = ("max_difference", "relative_error", "of_limit")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: "inf" if value == float("inf") else value for name, value in row.items()}


def _counted(results: Iterable[AuditResult]) -> AuditLog:
    log = AuditLog(alarm=False)
    for result in results:
        log.add(result)
    return log
