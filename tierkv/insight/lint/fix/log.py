"""Rewriting a whole log, and measuring it again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from tierkv.errors import ConfigError, StorageError
from tierkv.insight.lint.analysis import Analysis, measure, planned
from tierkv.insight.lint.causes import BY_NAME
from tierkv.insight.lint.fix.prompts import rewritten_parts
from tierkv.insight.lint.fix.requests import rewritten_line
from tierkv.insight.lint.options import CacheOptions
from tierkv.insight.lint.readers.entry import Format
from tierkv.insight.lint.readers.log import Log
from tierkv.insight.lint.report import Finding, FixResult, Severity
from tierkv.insight.lint.sources.text import TextSource
from tierkv.insight.lint.text.tokenise import Tokeniser

__all__ = ["check_fixable", "fix_log"]


def check_fixable(log: Log, out: Path) -> None:
    """Raise `ConfigError` if the log cannot be rewritten to `out`."""
    if log.format in (Format.TOKENS, Format.MOONCAKE, Format.NUMPY):
        raise ConfigError("a log of token ids cannot be rewritten", remedy="leave --fix out, or give the log as text")
    if out.exists() and out.samefile(log.path):
        raise ConfigError(f"--fix {out} is the log itself", remedy="name another file")


def fix_log(
    log: Log,
    source: TextSource,
    tokeniser: Tokeniser,
    analysis: Analysis,
    findings: Collection[Finding],
    out: Path,
    cache: CacheOptions,
) -> FixResult:
    """Write the log without what is found and worth it (`low` and above), and replay it.

    Raises `StorageError` if `out` cannot be written.
    """
    worth = {
        (finding.place, BY_NAME[finding.cause].code)
        for finding in findings
        if finding.fixable and finding.severity >= Severity.LOW
    }
    places = np.array([[(place, code) in worth for code in range(256)] for place in source.places] or [[False] * 256])
    changed = 0
    try:
        with out.open("w", encoding="utf-8") as file:
            for batch, requests in source.explained():
                plan = planned(batch, analysis.measured.statistics, source.grain)
                kept = (plan.causes > 0) & ~places[batch.places, plan.causes]
                live = np.where(kept & (batch.given > 0), batch.own, batch.live)
                begins = np.searchsorted(batch.requests, np.arange(batch.count))
                for number, request in enumerate(requests):
                    texts = rewritten_parts(plan, kept, live, request.slots, int(begins[number]), request.prompt.parts)
                    line, differs = rewritten_line(request.entry, request.prompt, texts)
                    changed += differs
                    file.write(line + "\n")
    except OSError as error:
        raise StorageError(
            f"cannot write {out}: {error.strerror}", remedy="name a file in a writable directory"
        ) from None
    kind = Format.TEXT if log.format is Format.TEXT else Format.OPENAI
    again = measure(TextSource(Log(out, str(out), kind), tokeniser, []), cache)
    return FixResult(str(out), changed, again.prompt_tokens, again.hit_tokens)
