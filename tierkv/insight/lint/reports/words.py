"""Sentences that several outputs have in common."""

from __future__ import annotations

from tierkv.insight.lint.readers.entry import Format
from tierkv.insight.lint.report import Finding, LintReport

__all__ = ["cache_words", "cost_words", "excerpt_place", "summary", "visible"]


def visible(text: str) -> str:
    """Make line ends and control characters visible: a quotation stays on its line and cannot steer a terminal."""
    shown = text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in shown)


def summary(report: LintReport) -> str:
    """Say how much hits now and could hit."""
    return (
        f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens: {report.hit_rate:.1%} hit, "
        f"{report.possible_rate:.1%} without what is found here"
    )


def cache_words(report: LintReport) -> str:
    """Say through which cache the log was replayed."""
    size = "no limit" if report.capacity_tokens is None else f"{report.capacity_tokens:,} tokens"
    return f"prefix cache: blocks of {report.block_tokens} tokens, {size}"


def cost_words(finding: Finding) -> str:
    """Say what a finding costs."""
    where = ", ".join(f"{share.template} {share.lost_tokens:,}" for share in finding.templates[:3])
    more = len(finding.templates) - 3
    where += f" and {more} more" if more > 0 else ""
    return (
        f"{finding.lost_tokens:,} tokens lost, {finding.share:.1%} of all, in {finding.requests:,} requests ({where})"
    )


def excerpt_place(finding: Finding, report: LintReport) -> str:
    """Say which two prompts are quoted."""
    quoted = finding.excerpt
    if quoted is None:
        return ""
    unit = "row" if report.format == Format.NUMPY else "line"
    return f"{unit} {quoted.line} against {unit} {quoted.other_line}, from token {quoted.token:,} on"
