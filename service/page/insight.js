// Why prompts were not cached: what GET /v1/insight says.

import { bar, curves } from "./charts.js";
import { h } from "./dom.js";
import { clock, count, percent, seconds, sum, words } from "./format.js";
import { key, list, plain, quiet, ratio, table } from "./parts.js";

// Causes as the bars show them: what prompts are, what policy did, what loading did, and what is left.
const GROUPS = [
  { name: "fresh", head: "New", title: "new content", causes: ["new"] },
  { name: "diverged", head: "Diverged", title: "left their template early", causes: ["diverged"] },
  { name: "evicted", head: "Evicted", title: "evicted", causes: ["evicted", "not_demoted_in_time"] },
  { name: "unloaded", head: "Not loaded", title: "not loaded", causes: ["late", "no_room", "failed", "cheaper_computed", "shared_away"] },
];
const KNOWN = new Set(GROUPS.flatMap((group) => group.causes));
const PARTS = [...GROUPS, { name: "other", head: "Other", title: "other" }];
const WITHIN = [["1min", "a minute"], ["10min", "10 minutes"], ["1h", "an hour"], ["1d", "a day"], ["later", "later"]];
const OFF = "This daemon does not look into requests: insight.enabled is false.";

function lostBy(tally, name) {
  const causes = Object.entries(tally.lost_tokens);
  const within = name === "other"
    ? causes.filter(([cause]) => !KNOWN.has(cause))
    : causes.filter(([cause]) => GROUPS.find((group) => group.name === name).causes.includes(cause));
  return within.reduce((total, [, tokens]) => total + tokens, 0);
}

function partsOf(tally) {
  const asked = tally.requested_tokens;
  const served = { name: "served", share: ratio(sum(tally.hit_tokens), asked) };
  return [served, ...PARTS.map(({ name }) => ({ name, share: ratio(lostBy(tally, name), asked) }))];
}

/** A part of what was requested, as a share; the number itself is in tokens. */
function portion(tokens, asked) {
  return plain(tokens, percent(ratio(tokens, asked)));
}

function money(value) {
  return plain(value, value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 4 : 0 }));
}

export function causes({ window: insight }) {
  if (!insight) return null;
  if (!insight.enabled) return quiet(OFF);
  if (!insight.requests) return quiet(`No request has been looked into since ${clock(insight.since)}.`);
  const asked = insight.requested_tokens;
  const served = sum(insight.hit_tokens);
  const dropped = insight.dropped ? [["requests not looked into, as others came too fast",
    plain(insight.dropped, count(insight.dropped))]] : [];
  const rows = Object.entries(insight.lost_tokens).sort(([, one], [, other]) => other - one).map(([cause, tokens]) => [
    [key(groupOf(cause)), words(cause)],
    plain(tokens, count(tokens)),
    portion(tokens, asked),
    cause in insight.lost_s ? plain(insight.lost_s[cause], seconds(insight.lost_s[cause])) : "–",
    insight.lost_price && cause in insight.lost_price ? money(insight.lost_price[cause]) : "–",
  ]);
  return [
    bar(partsOf(insight)),
    insight.window_s ? quiet(`${since(insight)}; the templates below since the start.`) : null,
    list([
      [[key("served"), "served"], plain(served, count(served)), percent(ratio(served, asked))],
      ...PARTS.map(({ name, title }) => [[key(name), title], plain(lostBy(insight, name), count(lostBy(insight, name))),
        percent(ratio(lostBy(insight, name), asked))]),
      ...dropped,
    ]),
    table("Causes", ["Lost, because", "Tokens", "Of requested", "Prefill", "Price"],
      rows.map(([name, ...cells]) => [{ text: name }, ...cells])),
  ];
}

function since(insight) {
  return `Counted since ${clock(insight.since)}`;
}

function groupOf(cause) {
  return GROUPS.find((group) => group.causes.includes(cause))?.name ?? "other";
}

export function templates({ insight }) {
  if (!insight?.enabled) return null;
  if (!insight.templates.length) return quiet("No two prompts in a few have begun alike yet.");
  const rows = outline(insight.templates).map(([template, level]) => row(template.label ?? template.id, template, level));
  if (insight.rest.requests) rows.push(row("everything else", insight.rest, 0));
  const heads = ["Template", "Tenant", "Trunk", "Requests", "Hit rate", "Tokens", ...PARTS.map(({ head }) => head),
    "Leave early"];
  return table("Templates", heads, rows);
}

function row(name, tally, level) {
  const asked = tally.requested_tokens;
  return [
    { text: name, props: { class: "branch", vars: { "--level": Math.min(level, 8) } } },
    tally.tenant ?? "–",
    tally.end === undefined ? "–" : `${count(tally.start)}–${count(tally.end)}`,
    plain(tally.requests, count(tally.requests)),
    percent(ratio(sum(tally.hit_tokens), asked)),
    bar(partsOf(tally)),
    ...PARTS.map(({ name }) => portion(lostBy(tally, name), asked)),
    (tally.divergences ?? []).slice(0, 3).map(({ share, token }) => `${percent(share)} at token ${count(token)}`)
      .join(", ") || "–",
  ];
}

/** Templates, each followed by those that branch off it, with their depth. */
function outline(templates) {
  const listed = new Set(templates.map(({ id }) => id));
  const branches = Map.groupBy(templates, ({ parent }) => (listed.has(parent) ? parent : null));
  const walk = (parent, level) =>
    (branches.get(parent) ?? []).flatMap((template) => [[template, level], ...walk(template.id, level + 1)]);
  return walk(null, 0);
}

export function room({ insight }) {
  if (insight && !insight.enabled) return quiet(OFF);
  if (!insight?.whatif) return quiet("Estimates are for operators, and need a request.");
  const { rates, mixed } = insight.whatif;
  const tiers = [...new Set(rates.map(({ tier }) => tier))];
  const factors = [...new Set(rates.map(({ factor }) => factor))];
  const rate = (tier, factor) => rates.find((known) => known.tier === tier && known.factor === factor).hit_rate;
  const named = factors.map((factor) => (factor === 1 ? "as it is" : `${factor}×`));
  const lines = tiers.map((tier) => ({ name: tier, shares: factors.map((factor) => rate(tier, factor)) }));
  return [
    curves(lines, named, "Estimated share of blocks found with other capacities; the table has the numbers"),
    table("What more room would give", ["Tier", ...named], tiers.map((tier) => [
      { text: [key(tier), tier === "cold" ? "cold, with memory" : tier] },
      ...factors.map((factor) => plain(rate(tier, factor), percent(rate(tier, factor)))),
    ])),
    mixed ? h("p", { class: "quiet" }, "Blocks of several sizes are counted as if they were of one.") : null,
  ];
}

export function regret({ window: insight }) {
  if (!insight?.enabled) return quiet(insight ? OFF : "");
  const rows = Object.entries(insight.tenants).flatMap(([tenant, { regret }]) =>
    Object.entries(regret).map(([tier, { tokens, lost_tokens: lost, within }]) => [
      `${tenant}, ${tier}`,
      plain(tokens, count(tokens)),
      plain(lost, count(lost)),
      ...WITHIN.map(([name]) => plain(within[name] ?? 0, count(within[name] ?? 0))),
    ]));
  if (!rows.length) return quiet("Nothing that was evicted has been wanted again.");
  const shown = table("Regret", ["Tokens evicted by", "Wanted again", "Gone for good", ...WITHIN.map(([, title]) => title)], rows);
  return [insight.window_s ? quiet(`${since(insight)}.`) : null, shown];
}

export function audits({ insight }) {
  const kept = Object.entries(insight?.tenants ?? {}).filter(([, { audits }]) => audits);
  if (!kept.length) return quiet("No engine has told of an audit.");
  const rows = kept.map(([tenant, { audits: { audits, tokens, worst } }]) => [
    tenant,
    plain(audits.ok, count(audits.ok)),
    ...["outside", "corrupt"].map((verdict) =>
      h("span", { class: audits[verdict] ? "bad" : "" }, plain(audits[verdict], count(audits[verdict])))),
    plain(tokens, count(tokens)),
    plain(worst.of_limit, worst.of_limit === "inf" ? "∞" : `${(100 * worst.of_limit).toFixed(0)} %`),
  ]);
  const last = kept.flatMap(([tenant, { audits }]) => audits.last.map((found) => [tenant, found])).slice(-8);
  const findings = last.reverse().map(([tenant, { at, verdict, reason, finding }]) => [
    clock(at),
    tenant,
    verdict,
    words(reason),
    finding ? `block ${count(finding.block)}, layer ${finding.layer}, ${finding.plane}` : "–",
  ]);
  return [
    table("Audits", ["Tenant", "OK", "Outside", "Corrupt", "Tokens", "Largest, of its limit"], rows),
    findings.length ? table("Latest findings", ["Time", "Tenant", "Verdict", "By", "Where"], findings) : null,
  ];
}
