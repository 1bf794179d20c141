"""`tierkv lint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["lint"]


def lint(
    log: Annotated[Path, typer.Argument(help="Log of requests, - for standard input.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", help="openai, anthropic, sharegpt, text, tokens, mooncake or numpy; default: found out."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or its directory; without it, tokens are approximate.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block of the prefix cache.")] = 16,
    capacity_tokens: Annotated[int | None, typer.Option(help="Size of the prefix cache; default: no limit.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that cannot be read.")] = False,
    no_text: Annotated[bool, typer.Option("--no-text", help="Show no text of any prompt.")] = False,
    fix: Annotated[
        Path | None, typer.Option(help="Write the log as it should be to this file, and measure it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON; also what --baseline reads.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report to this file, as HTML.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Also write the report to this file, as SARIF 2.1.0.")] = None,
    fail_on: Annotated[
        str | None, typer.Option(help="End with exit code 1 at findings of this severity: info, low, medium, high.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier report as JSON: its findings are known and do not fail.")
    ] = None,
) -> None:
    """Find out why prompts do not share prefixes, what it costs, and what to move where. Offline."""
    from tierkv.insight.lint.command import failing, parse_format, parse_severity, run_command
    from tierkv.insight.lint.options import CacheOptions

    level = parse_severity(fail_on) if fail_on is not None else None
    report = run_command(
        log,
        parse_format(kind) if kind is not None else None,
        skip_bad=skip_bad,
        tokenizer=tokenizer,
        cache=CacheOptions(block_tokens, capacity_tokens),
        with_text=not no_text,
        fix=fix,
        baseline=baseline,
        as_json=as_json,
        html_path=html,
        sarif_path=sarif,
    )
    if level is not None and failing(report, level):
        raise typer.Exit(1)
