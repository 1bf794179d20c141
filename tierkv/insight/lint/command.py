"""What `tierkv lint` does: read a log, find out, write what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tierkv.errors import ConfigError, StorageError
from tierkv.insight.lint.analysis import analyse
from tierkv.insight.lint.baseline import mark_known, read_baseline
from tierkv.insight.lint.fix.log import check_fixable, fix_log
from tierkv.insight.lint.options import CacheOptions
from tierkv.insight.lint.ranking import rank
from tierkv.insight.lint.readers.entry import Format
from tierkv.insight.lint.readers.log import Log, open_log
from tierkv.insight.lint.report import LintReport, Severity
from tierkv.insight.lint.reports.html import html_text
from tierkv.insight.lint.reports.plain import json_text
from tierkv.insight.lint.reports.sarif import sarif_text
from tierkv.insight.lint.reports.terminal import print_report
from tierkv.insight.lint.sources.ids import IdSource
from tierkv.insight.lint.sources.text import TextSource
from tierkv.insight.lint.text.tokenise import Tokeniser, load_tokeniser

__all__ = ["failing", "lint_log", "parse_format", "parse_severity", "run_command"]

_IDS = (Format.TOKENS, Format.NUMPY)


def lint_log(
    log: Log,
    tokenizer: Path | None = None,
    cache: CacheOptions = CacheOptions(),  # noqa: B008  frozen
    with_text: bool = True,
    fix: Path | None = None,
) -> LintReport:
    """Analyse a log.

    Parameters
    ----------
    tokenizer
        A tokenizer.json or a directory that holds one; without it, tokens of text are approximate.
    with_text
        Quote prompts in the report.
    fix
        Also write the log as it should be to this file, and measure it.

    Raises
    ------
    InvalidRequest
        A line cannot be read; names file and line.
    ConfigError
        There is no such tokenizer, the log has no tokens for it, or cannot be rewritten.
    StorageError
        A file cannot be read or written.
    """
    if fix is not None:
        check_fixable(log, fix)
    if log.format is Format.MOONCAKE and tokenizer is not None:
        raise ConfigError(f"{log.name} has hashes instead of tokens", remedy="leave --tokenizer out")
    tokeniser = load_tokeniser(tokenizer)
    skipped: list[str] = []
    source: TextSource | IdSource
    if log.format is Format.MOONCAKE or (log.format in _IDS and not tokeniser.exact):
        source = IdSource(log, skipped)
    else:
        source = TextSource(log, tokeniser, skipped)
    analysis = analyse(source, cache)
    findings, templates = rank(analysis, source, with_text)
    measured = analysis.measured
    report = LintReport(
        log=log.name,
        format=str(log.format),
        tokeniser=_tokens(log.format, tokeniser),
        exact=log.format in (*_IDS, Format.MOONCAKE) or tokeniser.exact,
        block_tokens=cache.block_tokens,
        capacity_tokens=cache.capacity_tokens,
        requests=measured.tokens.size,
        prompt_tokens=measured.prompt_tokens,
        hit_tokens=measured.hit_tokens,
        possible_tokens=measured.hit_tokens + sum(finding.lost_tokens for finding in findings),
        templates=templates,
        findings=findings,
        skipped=tuple(skipped),
    )
    if fix is not None and isinstance(source, TextSource):
        report = replace(report, fixed=fix_log(log, source, tokeniser, analysis, findings, fix, cache))
    return report


def run_command(
    path: Path,
    kind: Format | None,
    skip_bad: bool,
    tokenizer: Path | None,
    cache: CacheOptions,
    with_text: bool,
    fix: Path | None,
    baseline: Path | None,
    as_json: bool,
    html_path: Path | None,
    sarif_path: Path | None,
) -> LintReport:
    """Analyse a log, write the files asked for, and print the report, or only JSON."""
    known = read_baseline(baseline) if baseline is not None else {}
    with open_log(path, kind, skip_bad) as log:
        report = lint_log(log, tokenizer, cache, with_text, fix)
    report = replace(report, findings=mark_known(report.findings, known))
    for target, render in ((html_path, html_text), (sarif_path, sarif_text)):
        if target is not None:
            _write(target, render(report))
    if as_json:
        print(json_text(report))  # noqa: T201  this is the output asked for
    else:
        print_report(report, Console())
    return report


def failing(report: LintReport, level: Severity) -> int:
    """Count the findings that are new and at least of this severity."""
    return sum(not finding.known and finding.severity >= level for finding in report.findings)


def parse_format(name: str) -> Format:
    """Return the format of this name. Raises `ConfigError`."""
    try:
        return Format(name)
    except ValueError:
        raise ConfigError(f"no format {name!r}", remedy=f"say one of {', '.join(Format)}") from None


def parse_severity(name: str) -> Severity:
    """Return the severity of this name. Raises `ConfigError`."""
    for severity in Severity:
        if severity.label == name:
            return severity
    raise ConfigError(f"no severity {name!r}", remedy=f"say one of {', '.join(s.label for s in Severity)}")


def _tokens(kind: Format, tokeniser: Tokeniser) -> str:
    """Say whose the tokens are, and what would tell more."""
    if kind is Format.MOONCAKE:
        return "hashes of blocks: what changes in them cannot be told"
    if kind not in _IDS:
        return tokeniser.name
    if tokeniser.exact:
        return f"the log's own token ids, read with {tokeniser.name}"
    return "the log's own token ids; give --tokenizer, the model's, to read them and name what changes"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", remedy="name a file in a writable directory"
        ) from None
