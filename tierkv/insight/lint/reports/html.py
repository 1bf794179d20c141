"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tierkv.insight.lint.report import Finding, LintReport, TemplateReport
from tierkv.insight.lint.reports.words import cache_words, cost_words, excerpt_place, summary, visible

__all__ = ["html_text"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1f23;--dim:#5c636b;--line:#d8dce1;--paper:#fff;--soft:#f4f6f8;
--high:#b42318;--medium:#8a5a00;--low:#0b6e99;--info:#5c636b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--dim:#a3abb3;--line:#3a4047;--paper:#16191c;--soft:#20252a;
--high:#ff8f85;--medium:#e5b454;--low:#6cc4e8;--info:#a3abb3}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.dim{color:var(--dim)}.loud{color:var(--medium);font-weight:600}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
article{border-left:4px solid var(--line);padding:.1rem 1rem;margin:1rem 0}
article.high{border-color:var(--high)}article.medium{border-color:var(--medium)}article.low{border-color:var(--low)}
.severity{font-weight:700}.high .severity{color:var(--high)}.medium
.severity{color:var(--medium)}.low .severity{color:var(--low)}
pre{background:var(--soft);padding:.6rem;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}mark{background:none;
color:inherit;font-weight:700;text-decoration:underline}
"""


def html_text(report: LintReport) -> str:
    """Return the report as HTML: no script, nothing fetched."""
    return "\n".join(_page(report))


def _page(report: LintReport) -> Iterator[str]:
    title = f"tierkv lint: {escape(report.log)}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1><p>{escape(summary(report))}</p>"
    yield f'<p class="dim">{escape(cache_words(report))}</p>'
    yield f'<p class="{"dim" if report.exact else "loud"}">tokens: {escape(report.tokeniser)}</p>'
    if report.skipped:
        first = escape(visible(report.skipped[0]))
        yield f'<p class="loud">{len(report.skipped)} lines left out, the first: {first}</p>'
    if report.fixed is not None:
        fixed = report.fixed
        yield f"<p><strong>{escape(fixed.path)}: {fixed.changed:,} requests rewritten; hit rate {report.hit_rate:.1%} "
        yield f"before, {fixed.hit_rate:.1%} after, measured</strong></p>"
    yield "<h2>Findings</h2>"
    if not report.findings:
        yield "<p>Nothing found.</p>"
    for number, finding in enumerate(report.findings, start=1):
        yield from _finding(number, finding, report)
    yield '<h2>Templates</h2><div class="wide"><table><thead><tr><th>template</th><th class="number">requests</th>'
    yield '<th class="number">tokens</th><th class="number">hit</th><th class="number">possible</th>'
    yield "<th>recognised by</th></tr></thead><tbody>"
    for template in report.templates:
        yield _template(template)
    yield "</tbody></table></div></main></body></html>"


def _finding(number: int, finding: Finding, report: LintReport) -> Iterator[str]:
    severity = finding.severity.label
    known = ' <span class="dim">(known)</span>' if finding.known else ""
    title = f"{escape(finding.title)} in {escape(finding.place)}"
    yield f'<article class="{severity}"><h3>{number}. <span class="severity">{severity}</span> {title}{known}</h3>'
    yield f"<p>{escape(cost_words(finding))}</p>"
    yield f'<p>{escape(finding.advice)}</p><p class="dim">{escape(finding.why)}</p>'
    quoted = finding.excerpt
    if quoted is not None:
        yield f'<p class="dim">{escape(excerpt_place(finding, report))}</p>'
        if quoted.before or quoted.here or quoted.there:
            before = escape(visible(quoted.before))
            lines = (f"{before}<mark>{escape(visible(text))}</mark>" for text in (quoted.here, quoted.there))
            yield f"<pre>{'<br>'.join(lines)}</pre>"
    yield "</article>"


def _template(template: TemplateReport) -> str:
    tokens = max(template.prompt_tokens, 1)
    figures = (
        f"{template.requests:,}",
        f"{template.prompt_tokens:,}",
        f"{template.hit_tokens / tokens:.1%}",
        f"{template.possible_tokens / tokens:.1%}",
    )
    cells = "".join(f'<td class="number">{figure}</td>' for figure in figures)
    return f"<tr><td>{template.name}</td>{cells}<td>{escape(visible(template.label))}</td></tr>"
