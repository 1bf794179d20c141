"""What `tierkv lint` found out: the data all its outputs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tierkv.insight.lint.excerpt import Excerpt

__all__ = ["Finding", "FixResult", "LintReport", "Severity", "Share", "TemplateReport", "severity_of"]


class Severity(IntEnum):
    """How much a finding costs, by its share of all prompt tokens of the log; never by what it looks like."""

    INFO = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3

    @property
    def label(self) -> str:
        return self.name.lower()


_LEAST_SHARE = ((0.20, Severity.HIGH), (0.05, Severity.MEDIUM), (0.01, Severity.LOW))


def severity_of(share: float) -> Severity:
    """Return the severity of losing this share of the prompt tokens: high from 20 %, medium from 5 %, low from 1 %."""
    return next((severity for least, severity in _LEAST_SHARE if share >= least), Severity.INFO)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Requests that are instances of one prompt template.

    Attributes
    ----------
    name
        `T1` is the one with most prompt tokens.
    label
        Text it is recognised by; empty without text.
    possible_tokens
        Hits it would have without the causes found.
    """

    name: str
    label: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one template loses to a finding."""

    template: str
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause in one place of the prompts.

    Attributes
    ----------
    cause, title
        Name and title in the table of causes.
    lost_tokens
        Tokens that would have hit without it and without the causes in front of it in the prompt.
    share
        Of all prompt tokens of the log.
    requests
        How many lose something at or behind it.
    advice
        What to move where.
    templates
        Who loses how much, most first.
    known
        It is in the baseline, and has not grown.
    """

    cause: str
    title: str
    place: str
    severity: Severity
    lost_tokens: int
    share: float
    requests: int
    advice: str
    why: str
    fixable: bool
    templates: tuple[Share, ...]
    excerpt: Excerpt | None
    fingerprint: str
    known: bool = False


@dataclass(frozen=True, slots=True)
class FixResult:
    """A rewritten log, measured.

    Attributes
    ----------
    changed
        Requests that were rewritten.
    """

    path: str
    changed: int
    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class LintReport:
    """All of it.

    Attributes
    ----------
    tokeniser
        What cut the text into tokens; `exact` says whether it is a model's.
    possible_tokens
        Hits the log would have without the causes found.
    skipped
        Lines that could not be read.
    """

    log: str
    format: str
    tokeniser: str
    exact: bool
    block_tokens: int
    capacity_tokens: int | None
    requests: int
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int
    templates: tuple[TemplateReport, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...] = ()
    fixed: FixResult | None = None

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def possible_rate(self) -> float:
        return self.possible_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
