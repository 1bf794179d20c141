"""A plan as one HTML file that needs nothing else: its plots are SVG within the page.

matplotlib draws them (`pip install 'tierkv-cache[plot]'`): scales, ticks, error bars and text are its trade.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from tierkv.errors import DependencyMissing, StorageError
from tierkv.insight.plan.knee import Curve, curves
from tierkv.insight.plan.points import Figure, Plan, Point
from tierkv.insight.plan.report import disk_name, sentences, size

__all__ = ["check_plots", "write_page"]

_GIB = 1 << 30
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe and Ito's, told apart by everybody
_MARKS = ("o", "s", "^", "D", "v", "P")


def check_plots() -> None:
    """Raise `DependencyMissing` where `write_page` could not draw."""
    if find_spec("matplotlib") is None:
        raise DependencyMissing(
            "the page needs matplotlib", remedy="pip install 'tierkv-cache[plot]', or use --json instead"
        )


def write_page(plan: Plan, title: str, path: Path) -> None:
    """Write the page, replacing what is there.

    Raises `StorageError` if the file cannot be written. See `check_plots`.
    """
    plots = [
        _plot(plan, "hit rate", lambda point: point.hit_rate, None),
        _plot(plan, "mean time to first token, s", lambda point: point.ttft_mean_s, plan.baseline.ttft_mean_s),
    ]
    if plan.baseline.cost_per_hour is not None:
        plots.append(_plot(plan, "cost of an hour", lambda point: point.cost_per_hour, plan.baseline.cost_per_hour))
    base = plan.baseline
    template = Template((Path(__file__).parent / "page.html").read_text())
    page = template.substitute(
        title=html.escape(title),
        traffic=html.escape(
            f"{base.requests:,} requests in {base.span_s / 3600:.2f} h, {base.prompt_tokens:,} prompt tokens, "
            f"{size(base.total_bytes)} of distinct KV. A cache that never evicts hits {base.ideal_hit_rate:.3f}. "
            + (f"Estimated from {plan.samples} samples." if plan.samples else "Replayed in full.")
        ),
        findings="\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences(plan)),
        plots="\n".join(f"<figure>{plot}</figure>" for plot in plots),
        rows="\n".join(map(_row, plan.points)),
        cost="<th>cost of an hour</th>" if base.cost_per_hour is not None else "",
    )
    try:
        path.write_text(page)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", remedy="name a file in a folder of yours"
        ) from None


def _row(point: Point) -> str:
    figures = (point.hit_rate, point.ram_hit_rate, point.ttft_mean_s, point.ttft_p50_s, point.ttft_p95_s)
    cells = [f"{figure.value:.3f}" + (f" ± {figure.error:.3f}" if figure.error else "") for figure in figures]
    if point.cost_per_hour is not None:
        cells.append(f"{point.cost_per_hour.value:,.2f}")
    setup = point.setup
    names = (setup.policy, size(setup.ram_bytes), size(setup.disk_bytes) if setup.disk_bytes else "none")
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in (*names, *cells))}</tr>"


def _plot(plan: Plan, quantity: str, figure: Callable[[Point], Figure | None], without: float | None) -> str:
    """Draw one quantity over memory, a panel for each disk, a line for each policy; return the SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    drawn = curves(plan)
    disks = list(dict.fromkeys(curve.disk_bytes for curve in drawn))
    policies = list(dict.fromkeys(curve.policy for curve in drawn))
    # Text stays text: it is smaller, and can be read aloud and searched.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": quantity, "font.family": "sans-serif"}):
        sheet = Sheet(figsize=(3.4 * len(disks) + 1.2, 3.6), layout="constrained")
        panels = sheet.subplots(1, len(disks), sharey=True, squeeze=False)[0]
        for panel, disk in zip(panels, disks, strict=True):
            for curve in (curve for curve in drawn if curve.disk_bytes == disk):
                _line(panel, curve, figure, policies.index(curve.policy))
            if without is not None:
                panel.axhline(without, color="#777", linestyle=":", label="no cache")
            panel.set_xscale("log", base=2)
            panel.set_title(disk_name(disk), fontsize="medium")
            panel.set_xlabel("memory, GiB")
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.25)
        panels[0].set_ylabel(quantity)
        panels[0].legend(fontsize="small")
        buffer = io.StringIO()
        sheet.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    element = drawing[drawing.index("<svg") :]
    label = html.escape(f"{quantity} over memory", quote=True)
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _line(panel: Any, curve: Curve, figure: Callable[[Point], Figure | None], number: int) -> None:
    figures: Sequence[Figure] = [found for point in curve.points if (found := figure(point)) is not None]
    panel.errorbar(
        [point.setup.ram_bytes / _GIB for point in curve.points],
        [each.value for each in figures],
        yerr=[each.error or 0.0 for each in figures],
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKS[number % len(_MARKS)],
        markersize=4,
        capsize=2,
        linewidth=1.4,
        label=curve.policy,
    )
