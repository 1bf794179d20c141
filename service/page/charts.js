// Charts in plain SVG.

import { h } from "./dom.js";
import { percent } from "./format.js";

/**
 * Shares of a whole over time, one on top of the other.
 *
 * `runs`: lists of {t, ...shares}, with gaps in between; `names`: the shares from the bottom up; `marks`: {t, text}.
 */
export function stacked(runs, names, marks, now, span, label) {
  const x = (t) => (100 * (t - now + span)) / span;
  const y = (share) => 100 * (1 - share);
  const shown = runs.map((run) => run.filter((point) => point.t >= now - span)).filter((run) => run.length);
  const areas = names.map((name, level) => shown.map((run) => {
    const base = (point) => names.slice(0, level).reduce((total, other) => total + point[other], 0);
    const points = run.length > 1 ? run : [{ ...run[0], t: run[0].t - 1 }, run[0]];
    const upper = points.map((p) => `${x(p.t).toFixed(2)},${y(base(p) + p[name]).toFixed(2)}`);
    const lower = points.map((p) => `${x(p.t).toFixed(2)},${y(base(p)).toFixed(2)}`).reverse();
    return h("polygon", { class: `area ${name}`, points: [...upper, ...lower].join(" ") });
  }));
  const lines = [0, 0.5, 1].map((share) => h("line", { class: "grid", x1: 0, x2: 100, y1: y(share), y2: y(share) }));
  const restarts = marks.map((mark) => h("line", { class: "mark", x1: x(mark.t), x2: x(mark.t), y1: 0, y2: 100 }));
  // The drawing is stretched to its place; words are not.
  return h("figure", { class: "plot" },
    h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
      lines, areas, restarts),
    h("div", { class: "across", "aria-hidden": "true" },
      marks.map((mark) => h("span", { vars: { "--at": percentOf(x(mark.t) / 100) } }, mark.text))),
    h("div", { class: "up", "aria-hidden": "true" }, ["100 %", "50 %", "0 %"].map((text) => h("span", null, text))),
    h("div", { class: "along", "aria-hidden": "true" },
      [`${minutes(span)} ago`, `${minutes(span / 2)} ago`, "now"].map((text) => h("span", null, text))));
}

function minutes(span) {
  return span < 60 ? `${Math.round(span)} s` : `${(span / 60).toFixed(1).replace(".0", "")} min`;
}

/**
 * Lines of shares over some named places along.
 *
 * `lines`: {name, shares}, a share for each of `places`; `label`: what the picture says, in words.
 */
export function curves(lines, places, label) {
  const x = (at) => places.length < 2 ? 50 : (100 * at) / (places.length - 1);
  const y = (share) => (100 * (1 - share)).toFixed(2);
  const grid = [0, 0.5, 1].map((share) => h("line", { class: "grid", x1: 0, x2: 100, y1: y(share), y2: y(share) }));
  const drawn = lines.map(({ name, shares }) => h("polyline", {
    class: `curve ${name}`, points: shares.map((share, at) => `${x(at).toFixed(2)},${y(share)}`).join(" ") }));
  return h("figure", { class: "plot" },
    h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, grid, drawn),
    h("div", { class: "up", "aria-hidden": "true" }, ["100 %", "50 %", "0 %"].map((text) => h("span", null, text))),
    h("div", { class: "along", "aria-hidden": "true" }, places.map((text) => h("span", null, text))));
}

/** A bar of parts of a whole, {name, share}, for the eye: a number is beside it. `mark`: a line at this share, if any. */
export function bar(parts, mark = null) {
  return h("span", { class: "bar", "aria-hidden": "true" },
    parts.map(({ name, share }) => h("span", { class: name, vars: { "--share": percentOf(share) } })),
    mark === null ? null : h("i", { vars: { "--at": percentOf(mark) } }));
}

/** Segments as columns, filled by their blocks. */
export function columns(segments, most) {
  return h("div", { class: "columns", "aria-hidden": "true" },
    segments.map((s) => h("span", { class: s.state, title: `${s.name}: ${percent(s.blocks / most)}` },
      h("i", { vars: { "--share": percentOf(s.blocks / most) } }))));
}

function percentOf(share) {
  return `${(100 * Math.min(1, Math.max(0, share || 0))).toFixed(2)}%`;
}
