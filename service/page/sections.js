// What each section about the stats shows, as descriptions of elements.

import { bar, columns, stacked } from "./charts.js";
import { h } from "./dom.js";
import { ago, bytes, clock, count, percent, rate, seconds, sum, words } from "./format.js";
import { key, list, plain, quiet, ratio, stat, table } from "./parts.js";

export const TIERS = ["hot", "warm", "cold"];
const SHARED_STATES = {
  closed: "answers",
  open: "does not answer, and is left alone for a while",
  "half-open": "did not answer, and is asked again",
  connecting: "is being connected to",
  shut: "is closed",
};

export function figures({ stats, history }) {
  const { counters } = stats;
  const minute = history.hitRate(60);
  const total = ratio(sum(counters.hit_tokens), counters.requested_tokens);
  const faults = sum(counters.corrupt_blocks) + sum(stats.tiers.cold?.damage);
  return list([
    ["Token hit rate, last minute", plain(minute ?? "", percent(minute))],
    ["Token hit rate since start", plain(total ?? "", percent(total))],
    ["Tokens from cache", plain(sum(counters.hit_tokens), count(sum(counters.hit_tokens)))],
    ["Prefill saved", stat(stats, "counters.saved_seconds", seconds)],
    ["Waited for loads", stat(stats, "counters.exposed_seconds", seconds)],
    ["Blocks that can be hit", stat(stats, "published_blocks", count)],
    ["Corrupt copies and damage found", h("span", { class: faults ? "bad" : "" }, plain(faults, count(faults)))],
  ]);
}

export function hits({ stats, history, now }) {
  const runs = history.hitRates();
  const tiers = [...TIERS.filter((tier) => stats.tiers[tier]), ...(stats.shared ? ["shared"] : [])];
  const { counters } = stats;
  const minute = percent(history.hitRate(60));
  const { span } = history;
  const label = `Share of requested tokens served by each tier, last ${span / 60} minutes; ${minute} in the last one`;
  return [
    runs.length ? null : quiet("No request since this page was opened."),
    stacked(runs, tiers, history.marks, now, span, label),
    list([
      ...tiers.map((tier) => [
        [key(tier), `served from ${tier}`],
        stat(stats, `counters.hit_tokens.${tier}`, count),
        percent(ratio(counters.hit_tokens[tier] ?? 0, counters.requested_tokens)),
      ]),
      ["tokens requested", stat(stats, "counters.requested_tokens", count)],
      ["from a neighbour's prefill", stat(stats, "counters.shared_tokens", count)],
      ["requests", stat(stats, "counters.acquires", count)],
    ]),
  ];
}

export function tiers({ stats }) {
  const rows = TIERS.filter((tier) => stats.tiers[tier]).map((tier) => {
    const { used_bytes: used, capacity_bytes: capacity } = stats.tiers[tier];
    return [
      { text: [key(tier), tier] },
      [bar([{ name: tier, share: used / capacity }]), plain(used / capacity, percent(ratio(used, capacity)))],
      stat(stats, `tiers.${tier}.used_bytes`, bytes),
      stat(stats, `tiers.${tier}.capacity_bytes`, bytes),
      stat(stats, `tiers.${tier}.blocks`, count),
      stat(stats, `tiers.${tier}.payload_bytes`, bytes),
      tier in stats.dirty_bytes ? stat(stats, `dirty_bytes.${tier}`, bytes) : "–",
      stat(stats, `counters.evicted_blocks.${tier}`, count),
    ];
  });
  return table("Tiers", ["Tier", "Full", "Used", "Capacity", "Blocks", "Payload", "Not below yet", "Evicted"], rows);
}

export function flow({ stats, history }) {
  const present = TIERS.filter((tier) => stats.tiers[tier]);
  const steps = present.slice(1).map((below, at) => [present[at], below]);
  if (stats.shared) steps.push([present.includes("warm") ? "warm" : present[0], "shared"]);
  if (!steps.length) return quiet("There is one tier only.");
  const row = (verb, from, to) => {
    const move = `${from}>${to}`;
    const perSecond = history.perSecond((s) => s.counters[`${verb}_bytes`][move] ?? 0);
    return [
      `${from} → ${to}`,
      plain(perSecond, rate(perSecond)),
      stat(stats, `counters.${verb}_blocks.${move}`, count),
      stat(stats, `counters.${verb}_bytes.${move}`, bytes),
    ];
  };
  const rows = steps.flatMap(([above, below]) =>
    below === "shared" ? [row("promoted", below, above)] : [row("promoted", below, above), row("demoted", above, below)]);
  return table("Flow between tiers", ["Move", "Now", "Blocks", "Bytes"], rows);
}

export function prefetch({ stats }) {
  const { counters, loads } = stats;
  const hidden = ratio(counters.hidden_seconds, counters.load_seconds);
  return [
    bar([{ name: "hidden", share: hidden }, { name: "exposed", share: hidden === null ? 0 : 1 - hidden }]),
    list([
      [
        [key("hidden"), "load time hidden by prefetching"],
        stat(stats, "counters.hidden_seconds", seconds),
        percent(hidden),
      ],
      [[key("exposed"), "load time that requests waited"], stat(stats, "counters.exposed_seconds", seconds)],
      ["load time in all", stat(stats, "counters.load_seconds", seconds)],
      ["lead, from arrival to use, summed over blocks", stat(stats, "counters.lead_seconds", seconds)],
      ["loaded and never used", stat(stats, "counters.wasted_bytes", bytes)],
      ["loads waiting", stat(stats, "loads.queued", count), bytes(loads.waiting_bytes)],
      ["loading now", stat(stats, "loads.running_bytes", bytes)],
    ]),
  ];
}

export function leases({ stats }) {
  const kinds = Object.keys(stats.leases);
  const rows = kinds.map((kind) => [
    kind,
    stat(stats, `leases.${kind}`, count),
    stat(stats, `counters.expired_leases.${kind}`, count),
  ]);
  return [
    table("Leases", ["Lease", "Live", "Ended by deadline"], rows),
    list([
      ["compute leases granted", stat(stats, "counters.compute_leases.granted", count)],
      ["of which done", stat(stats, "counters.compute_leases.done", count)],
      ["sessions remembered", stat(stats, "sessions", count)],
      ["slots in quarantine", stat(stats, "quarantined_slots", count)],
    ]),
  ];
}

export function tenants({ stats }) {
  const names = Object.keys(stats.tenants);
  if (!names.length) return quiet("No tenant has asked for anything yet.");
  const present = TIERS.filter((tier) => stats.tiers[tier]);
  const rows = names.sort().map((name) => {
    const tenant = stats.tenants[name];
    return [
      name,
      plain(tenant.weight, tenant.weight),
      percent(ratio(sum(tenant.hit_tokens), tenant.requested_tokens)),
      plain(tenant.requested_tokens, count(tenant.requested_tokens)),
      ...present.map((tier) => portion(stats, tenant, tier)),
    ];
  });
  return table("Tenants", ["Tenant", "Weight", "Hit rate", "Tokens requested", ...present.map((t) => `In ${t}`)], rows);
}

/** What a tenant uses of a tier, against its quota or, in memory, its part by weight. */
function portion(stats, tenant, tier) {
  const capacity = stats.tiers[tier].capacity_bytes;
  const used = tenant.used_bytes[tier] ?? 0;
  const quota = tenant.quotas[tier];
  const users = Object.values(stats.tenants).filter((t) => t.used_bytes[tier] || t === tenant);
  const part = (capacity * tenant.weight) / users.reduce((total, t) => total + t.weight, 0);
  const bound = quota ?? (tier === "cold" ? null : part);
  const said = quota !== undefined ? `, quota ${bytes(quota)}` : bound === null ? "" : `, part ${bytes(part)}`;
  return [
    bar([{ name: tier, share: used / capacity }], bound === null ? null : bound / capacity),
    plain(used, bytes(used)),
    h("small", null, said),
  ];
}

export function trunks({ trunks }) {
  if (!trunks.length) return quiet("Nothing is in memory.");
  const most = Math.max(1, ...trunks.map((trunk) => trunk.uses));
  const rows = outline(trunks).map(([trunk, level]) => [
    { text: prefixName(trunk), props: { class: "branch", vars: { "--level": Math.min(level, 8) } } },
    trunk.tenant ?? "–",
    [bar([{ name: "uses", share: trunk.uses / most }]), plain(trunk.uses, count(trunk.uses))],
    trunk.unused_s === null ? "never" : plain(trunk.unused_s, ago(trunk.unused_s)),
    plain(trunk.blocks, count(trunk.blocks)),
    trunk.tokens === null ? "–" : plain(trunk.tokens, count(trunk.tokens)),
    plain(trunk.nbytes, bytes(trunk.nbytes)),
    plain(trunk.branches, count(trunk.branches)),
  ]);
  const heads = ["The most used", "Tenant", "Uses", "Last use", "Blocks", "Tokens", "Size", "Branches"];
  return table("Prefixes in memory", heads, rows);
}

function prefixName({ parent, model, namespace, depth, blocks }) {
  const range = blocks === 1 ? `block ${depth}` : `blocks ${depth}–${depth + blocks - 1}`;
  return parent === null ? `${model ?? namespace.slice(0, 8)}, ${range}` : range;
}

/** Trunks, each followed by its branches, with their depth in the tree. */
function outline(trunks) {
  const branches = Map.groupBy(trunks, (trunk) => trunk.parent);
  const walk = (parent, level) =>
    (branches.get(parent) ?? []).flatMap((trunk) => [[trunk, level], ...walk(trunk.id, level + 1)]);
  return walk(null, 0);
}

export function segments({ stats }) {
  const cold = stats.tiers.cold;
  if (!cold) return quiet("There is no cold tier.");
  const most = Math.max(1, ...cold.segments.map((segment) => segment.blocks));
  const compression = ratio(cold.payload_bytes, cold.stored_bytes);
  return [
    columns(cold.segments, most),
    list([
      ["segments", plain(cold.segments.length, count(cold.segments.length))],
      ["coded blocks", stat(stats, "tiers.cold.stored_bytes", bytes)],
      ["payload", stat(stats, "tiers.cold.payload_bytes", bytes)],
      ["compression", compression === null ? "–" : plain(compression, `${compression.toFixed(2)} times`)],
    ]),
    h("details", null, h("summary", null, "Every segment"),
      table("Segments", ["Segment", "State", "Sequence", "Blocks", "Size"], cold.segments.map((segment) => [
        segment.name,
        words(segment.state),
        segment.sequence === null ? "–" : plain(segment.sequence, count(segment.sequence)),
        plain(segment.blocks, count(segment.blocks)),
        plain(segment.size, bytes(segment.size)),
      ]))),
  ];
}

export function misses({ stats, misses }) {
  const reasons = Object.keys(stats.counters.missed_blocks);
  const rows = misses.map(({ at, tenant, details }) => [
    clock(at),
    tenant ?? "–",
    plain(details.requested_tokens, count(details.requested_tokens)),
    plain(sum(details.hit_tokens), count(sum(details.hit_tokens))),
    Object.entries(details.missed_blocks).map(([reason, blocks]) => `${count(blocks)} ${words(reason)}`).join(", "),
  ]);
  const totals = reasons.sort().map((reason) => [
    `blocks missed: ${words(reason)}`, stat(stats, `counters.missed_blocks.${reason}`, count)]);
  return [
    totals.length ? list(totals) : quiet("Nothing was missed."),
    rows.length ? table("Latest misses", ["Time", "Tenant", "Asked", "Served", "Blocks missed"], rows) : null,
  ];
}

export function faults({ stats, faults }) {
  const { counters, tiers } = stats;
  const of = (group, title) => Object.keys(counters[group]).sort().map((name) => [
    `${title} ${words(name)}`, stat(stats, `counters.${group}.${name}`, count)]);
  const rows = [
    ...of("corrupt_blocks", "corrupt copies:"),
    ...Object.keys(tiers.cold?.damage ?? {}).sort().map((cause) => [
      `cold damage: ${words(cause)}`, stat(stats, `tiers.cold.damage.${cause}`, count)]),
    ...of("refused_demotions", "not taken by the cold tier:"),
    ...of("lost_blocks", "no longer published:"),
  ];
  const findings = tiers.cold?.findings ?? [];
  const latest = faults.map(({ at, kind, tenant, details }) => [
    clock(at),
    kind === "corrupt" ? "corrupt copy removed" : `${details.lease} lease ended by its deadline`,
    kind === "corrupt" ? `${details.tier}, ${words(details.cause)}` : "–",
    tenant ?? "–",
  ]);
  return [
    rows.length ? list(rows) : quiet("None."),
    findings.length ? h("ul", { class: "findings" }, findings.map((text) => h("li", null, text))) : null,
    latest.length ? table("Latest faults", ["Time", "What", "Where", "Tenant"], latest) : null,
  ];
}

export function shared({ stats, history }) {
  const { shared } = stats;
  if (!shared) return quiet("There is no shared tier.");
  const perSecond = (name) => history.perSecond((s) => s.shared?.[name] ?? 0);
  const counted = (group, title) => Object.keys(shared[group]).sort().map((name) => [
    `${title} ${words(name)}`, stat(stats, `shared.${group}.${name}`, count)]);
  const share = ratio(shared.used_bytes, shared.capacity_bytes);
  return [
    h("p", { class: shared.state === "closed" && !shared.full ? "quiet" : "bad" },
      `${shared.kind}: ${SHARED_STATES[shared.state] ?? shared.state}${shared.full ? ", and is full" : ""}`),
    bar([{ name: "shared", share }]),
    list([
      ["used", stat(stats, "shared.used_bytes", bytes), percent(share)],
      ["capacity", shared.capacity_bytes ? stat(stats, "shared.capacity_bytes", bytes) : "no bound known"],
      ["blocks known to be there", stat(stats, "shared.known_blocks", count)],
      ["blocks waiting to be written", stat(stats, "shared.waiting_blocks", count)],
      ["written", stat(stats, "shared.uploaded_bytes", bytes), rate(perSecond("bytes_out"))],
      ["read, as stored there", stat(stats, "shared.bytes_in", bytes), rate(perSecond("bytes_in"))],
      ...counted("skipped", "blocks not written:"),
      ...counted("probes", "requests that asked it:"),
      ...counted("claims", "prefills announced:"),
      ...counted("failures", "calls that failed:"),
    ]),
    shared.last_error ? h("p", { class: "findings" }, `last error: ${shared.last_error}`) : null,
    shared.warnings.length ? h("ul", { class: "findings" }, shared.warnings.map((text) => h("li", null, text))) : null,
  ];
}
