"""From losses to findings, the most expensive first."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b

from tierkv.insight.lint.analysis import Analysis, Loss
from tierkv.insight.lint.causes import BY_CODE
from tierkv.insight.lint.causes.spelling import TOKENISER
from tierkv.insight.lint.excerpt import excerpt, template_label
from tierkv.insight.lint.report import Finding, Share, TemplateReport, severity_of
from tierkv.insight.lint.sources.source import Shown, Source
from tierkv.insight.lint.survey import LossKey

__all__ = ["fingerprint", "rank"]

_TEMPLATES = 20


def rank(analysis: Analysis, source: Source, with_text: bool) -> tuple[tuple[Finding, ...], tuple[TemplateReport, ...]]:
    """Build findings, one per cause and place, and the templates; quote from the log where that is allowed."""
    order = sorted(analysis.templates, key=lambda name: (-analysis.templates[name].prompt_tokens, name))
    names = {template: f"T{number}" for number, template in enumerate(order, start=1)}
    groups: defaultdict[tuple[int, int], list[tuple[LossKey, Loss]]] = defaultdict(list)
    for key, loss in analysis.losses.items():
        if loss.tokens > 0:
            groups[key.cause, key.place].append((key, loss))
    for losses in groups.values():
        losses.sort(key=lambda pair: (-pair[1].tokens, pair[0]))
    shown = _shown(analysis, source, groups, order[:_TEMPLATES])
    findings = [_finding(losses, source, analysis, names, shown, with_text) for losses in groups.values()]
    findings.sort(key=lambda finding: (-finding.lost_tokens, finding.fingerprint))
    templates = []
    for template in order:
        totals = analysis.templates[template]
        example = shown.get(totals.example)
        label = template_label(example, template) if example is not None and with_text else ""
        figures = (totals.requests, totals.prompt_tokens, totals.hit_tokens, totals.possible_tokens)
        templates.append(TemplateReport(names[template], label, *figures))
    return tuple(findings), tuple(templates)


def fingerprint(cause: str, place: str) -> str:
    """Return what names a finding from one log to the next."""
    return blake2b(f"{cause}|{place}".encode(), digest_size=8).hexdigest()


def _shown(
    analysis: Analysis, source: Source, groups: dict[tuple[int, int], list[tuple[LossKey, Loss]]], templates: list[int]
) -> dict[int, Shown]:
    wanted = {number for losses in groups.values() for number in _compared(losses[0][1], source)}
    return source.show(wanted | {analysis.templates[template].example for template in templates})


def _compared(loss: Loss, source: Source) -> tuple[int, int]:
    """Return the request to quote and the earlier one to quote beside it; -1: none."""
    previous = source.previous_turn(loss.suspect.example)
    return loss.suspect.example, loss.suspect.relative if previous is None else previous


def _finding(
    losses: list[tuple[LossKey, Loss]],
    source: Source,
    analysis: Analysis,
    names: dict[int, str],
    shown: dict[int, Shown],
    with_text: bool,
) -> Finding:
    cause, place = BY_CODE[losses[0][0].cause], source.places[losses[0][0].place]
    example, relative = _compared(losses[0][1], source)
    lost = sum(loss.tokens for _, loss in losses)
    share = lost / max(analysis.measured.prompt_tokens, 1)
    quoted = None
    if relative in shown:
        offset = losses[0][1].suspect.example_offset
        quoted = excerpt(shown[example], shown[relative], offset, with_text, cause is TOKENISER)
    return Finding(
        cause=cause.name,
        title=cause.title,
        place=place,
        severity=severity_of(share),
        lost_tokens=lost,
        share=share,
        requests=sum(loss.suspect.requests for _, loss in losses),
        advice=cause.advice.format(place=place),
        why=cause.why,
        fixable=cause.fixable,
        templates=tuple(Share(names[key.template], loss.tokens) for key, loss in losses),
        excerpt=quoted,
        fingerprint=fingerprint(cause.name, place),
    )
