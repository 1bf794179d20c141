// What sections are made of: numbers, lists, tables. A number of the stats carries its path as `data-stat`.

import { h } from "./dom.js";

export function plain(value, text) {
  return h("data", { value }, text);
}

/** A number of the stats: the value at `path`, 0 where a counter has not counted yet. */
export function stat(stats, path, show) {
  const value = path.split(".").reduce((part, name) => part?.[name], stats) ?? 0;
  return h("data", { value, "data-stat": path }, show(value));
}

/** Terms and their numbers: [term, number, ...remarks] each. */
export function list(rows) {
  return h("dl", null, rows.map(([term, ...said]) =>
    h("div", null, h("dt", null, term), said.filter(Boolean).map((part) => h("dd", null, part)))));
}

/** A table whose first column names its rows. */
export function table(caption, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h("table", null,
      h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null, rows.map(([first, ...cells]) => h("tr", null,
        h("th", { scope: "row", ...first.props }, first.text ?? first),
        cells.map((cell) => h("td", null, cell)))))));
}

export function quiet(text) {
  return h("p", { class: "quiet" }, text);
}

export function key(name) {
  return h("span", { class: `key ${name}`, "aria-hidden": "true" });
}

export function ratio(part, whole) {
  return whole ? part / whole : null;
}
