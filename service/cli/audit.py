"""`tierkv audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from tierkv.service.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.insight.audit import AuditLog, AuditResult

__all__ = ["app"]


class _ReportUnlessNamed(TyperGroup):
    """Takes ``tierkv audit FILE`` for ``tierkv audit report FILE``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["report", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ReportUnlessNamed,
    help="Compute hits again without the cache, and compare. Ends with 1 unless all agree.",
    no_args_is_help=True,
)

OutOption = Annotated[Path | None, typer.Option("--out", help="Append each result to this file, as JSON lines.")]
PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help='JSON lines: {"prompt": "text"} or {"tokens": [1, 2]}.')
]
SampleOption = Annotated[float, typer.Option(min=0, max=1, help="Share of the hits to audit.")]


@app.command("report")
def report(
    file: Annotated[Path, typer.Argument(help="Results of audits, as --out writes them.")], as_json: JsonOption = False
) -> None:
    """Show what audits have found."""
    from tierkv.insight.audit.report import read_results

    _finish(read_results(file), None, as_json)


@app.command("run")
def run(
    model: Annotated[
        Path | None, typer.Option("--model", help="A checkpoint: directory or GGUF file. Default: the demo's.")
    ] = None,
    prompts: PromptsOption = None,
    count: Annotated[int, typer.Option("--random", min=1, help="Without --prompts: so many of random tokens.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Their length.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is asked for again.")] = 1,
    sample: SampleOption = 1.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    lossy: Annotated[str, typer.Option(help="A lossy codec, such as eq3.")] = "",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 32,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Prefill step. Default: a block; then bits agree.")] = 0,
    url: Annotated[str, typer.Option("--url", help="Audit this daemon's cache instead of one made for this.")] = "",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store prompts of a transformers model, have them served from disk, and compare with computing them."""
    import tierkv
    from tierkv.insight.audit import AuditLog
    from tierkv.insight.audit.prompts import read_prompts
    from tierkv.insight.audit.report import write_result
    from tierkv.insight.audit.running import audit_prompts, disk, load_checkpoint, random_prompts, tokenize

    if model is None:
        from tierkv.service.demo.model import find_checkpoint

        model = find_checkpoint()
    named = None if prompts is None else read_prompts(prompts)
    loaded = load_checkpoint(model, dtype)
    wanted = random_prompts(loaded.model, count, tokens) if named is None else tokenize(named, model)
    results: list[AuditResult] = []
    log = AuditLog(alarm=False)

    def keep(result: AuditResult) -> None:
        results.append(result)
        if out is not None:
            write_result(out, result)

    with disk() as own:
        audit_prompts(
            loaded,
            loaded.spec(block_tokens, lossy),
            (lambda: tierkv.connect(url)) if url else own,
            wanted,
            chunk_tokens=chunk_tokens or block_tokens,
            rounds=rounds,
            sample=sample,
            log=log,
            report=keep,
        )
    _finish(results, log, as_json)


@app.command("vllm")
def vllm(
    prompts: Annotated[Path, typer.Option("--prompts", help='JSON lines: {"prompt": "text"} or {"tokens": [1, 2]}.')],
    url: Annotated[str, typer.Option("--url", help="vLLM's server, such as http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="The model's name there. Default: the first.")] = "",
    token: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="Its API key.")] = "",
    sample: SampleOption = 0.05,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answers to compare.")] = 16,
    floor: Annotated[float, typer.Option(min=0, help="Log probabilities may always differ by this.")] = 0.001,
    forget: Annotated[
        bool, typer.Option("--forget", help="Drop vLLM's own prefix cache first, so that hits come from tierkv.")
    ] = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send prompts to a running vLLM, and hits again under a new cache salt."""
    from tierkv.insight.audit import AuditLog
    from tierkv.insight.audit.prompts import read_prompts
    from tierkv.insight.audit.report import write_result
    from tierkv.insight.audit.vllm import Endpoint, audit_endpoint

    endpoint, log = Endpoint(url, model=model, token=token), AuditLog(alarm=False)
    if forget:
        endpoint.forget()
    results = audit_endpoint(
        endpoint, read_prompts(prompts), max_tokens=max_tokens, sample=sample, floor=floor, log=log
    )
    if out is not None:
        for result in results:
            write_result(out, result)
    _finish(results, log, as_json)


def _finish(results: Sequence[AuditResult], log: AuditLog | None, as_json: bool) -> None:
    from tierkv.insight.audit.report import exit_code, print_report, report_dict

    if as_json:
        import json

        typer.echo(json.dumps(report_dict(results, log), indent=2))
    else:
        from rich.console import Console

        print_report(results, Console(), log)
    raise typer.Exit(exit_code(results, log))
