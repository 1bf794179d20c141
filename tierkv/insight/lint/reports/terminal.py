"""A report for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierkv.insight.lint.report import Finding, LintReport, Severity, TemplateReport
from tierkv.insight.lint.reports.words import cache_words, cost_words, excerpt_place, summary, visible

__all__ = ["print_report"]

_STYLES = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "cyan", Severity.INFO: "dim"}
_TEMPLATES = 8


def print_report(report: LintReport, console: Console) -> None:
    """Print a report."""

    def line(text: str | Text, style: str = "") -> None:
        console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True, highlight=False)

    line(f"{report.log} ({report.format})", "bold")
    line(summary(report))
    line(cache_words(report), "dim")
    line(f"tokens: {report.tokeniser}", "dim" if report.exact else "bold yellow")
    if report.skipped:
        line(f"{len(report.skipped)} lines left out, the first: {visible(report.skipped[0])}", "yellow")
    console.print(_templates(report.templates))
    if not report.findings:
        line("Nothing found.", "green")
    for number, finding in enumerate(report.findings, start=1):
        line("")
        for text in _finding(number, finding, report):
            line(text)
    if report.fixed is not None:
        fixed = report.fixed
        line("")
        line(
            f"{fixed.path}: {fixed.changed:,} requests rewritten; hit rate {report.hit_rate:.1%} before, "
            f"{fixed.hit_rate:.1%} after, measured",
            "bold green",
        )


def _finding(number: int, finding: Finding, report: LintReport) -> list[Text]:
    known = "  (known)" if finding.known else ""
    head = Text(f"{number}. ").append(finding.severity.label, _STYLES[finding.severity])
    head.append(f"  {finding.title} in {finding.place}", "bold").append(known, "dim")
    lines = [head, Text(f"   {cost_words(finding)}"), Text(f"   {finding.advice}")]
    quoted = finding.excerpt
    if quoted is not None:
        lines.append(Text(f"   {excerpt_place(finding, report)}", "dim"))
        if quoted.before or quoted.here or quoted.there:
            before = Text(f"     {visible(quoted.before)}", "dim")
            lines.append(before.copy().append(visible(quoted.here), "not dim bold"))
            lines.append(before.copy().append(visible(quoted.there), "not dim bold"))
    return lines


def _templates(templates: tuple[TemplateReport, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column("template", no_wrap=True)
    for heading in ("requests", "tokens", "hit", "possible"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("recognised by", no_wrap=True, overflow="ellipsis", ratio=1)
    for template in templates[:_TEMPLATES]:
        tokens = max(template.prompt_tokens, 1)
        figures = (f"{template.hit_tokens / tokens:.1%}", f"{template.possible_tokens / tokens:.1%}")
        label = Text(visible(template.label))
        table.add_row(template.name, f"{template.requests:,}", f"{template.prompt_tokens:,}", *figures, label)
    if len(templates) > _TEMPLATES:
        rest = templates[_TEMPLATES:]
        table.add_row(
            f"{len(rest)} more", f"{sum(t.requests for t in rest):,}", f"{sum(t.prompt_tokens for t in rest):,}"
        )
    return table
