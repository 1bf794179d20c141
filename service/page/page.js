// The dashboard: follows the daemon's events and shows what they say.

import { render } from "./dom.js";
import { count, seconds } from "./format.js";
import { History } from "./history.js";
import * as insightful from "./insight.js";
import * as sections from "./sections.js";
import { Denied, credentials, follow } from "./stream.js";

const STREAM = "/v1/events?stats=1&kinds=missed,corrupt,expired&last=2000";
const TRUNKS = "/v1/trunks?most=24";
const INSIGHT = "/v1/insight";
const ASK_EVERY_MS = 5_000; // what the stream does not tell
const LATEST = 8; // misses and faults that are listed
const SECTIONS = { ...sections, ...insightful };
const PLACES = ["figures", "hits", "tiers", "flow", "prefetch", "causes", "templates", "room", "regret", "shared",
  "tenants", "trunks", "misses", "leases", "segments", "faults", "audits"];
const TOKEN = "tierkv-token";
const STATES = { live: "live", lost: "not reachable, trying again" };

const at = (id) => document.getElementById(id);
const view = { stats: null, history: new History(), trunks: [], insight: null, window: null, misses: [], faults: [], now: 0 };
let current = 0; // counts the tokens that were tried

function onState(state) {
  at("status").dataset.state = state;
  at("status").textContent = STATES[state];
}

function onEvent(kind, data) {
  if (kind === "stats") {
    view.stats = data;
    view.now = Date.now() / 1000;
    view.history.add(view.now, data);
    show();
  } else if (kind === "acquired") {
    view.misses = [data, ...view.misses].slice(0, LATEST);
  } else if (kind === "corrupt" || kind === "expired") {
    view.faults = [data, ...view.faults].slice(0, LATEST);
  }
}

function show() {
  at("board").hidden = false;
  for (const name of PLACES) render(at(name), SECTIONS[name](view));
  const { stats } = view;
  const about = [`up ${seconds(stats.uptime_s)}`, `${count(stats.namespaces)} namespaces`, `run ${stats.generation}`];
  at("about").textContent = about.join(" · ");
  document.body.dataset.generation = stats.generation;
}

/** Ask for what is at `path` again and again, and hand it to `take`. */
async function keep(path, token, take) {
  const mine = current;
  while (mine === current) {
    await ask(path, token, take);
    await new Promise((resolve) => setTimeout(resolve, ASK_EVERY_MS));
  }
}

async function ask(path, token, take) {
  try {
    const response = await fetch(path, { headers: credentials(token), cache: "no-store" });
    if (response.ok) take(await response.json());
  } catch {
    // The stream says that the daemon is gone.
  }
}

/** Ask for all since the start, and for the window that is chosen. */
function onInsight(insight, token) {
  view.insight = insight;
  const seconds = at("window").value;
  view.window = seconds ? view.window : insight;
  if (seconds) {
    ask(`${INSIGHT}?window=${seconds}`, token, (found) => {
      if (at("window").value === seconds) view.window = found;
    });
  }
}

async function start(token) {
  current += 1;
  keep(TRUNKS, token, ({ trunks }) => (view.trunks = trunks));
  keep(INSIGHT, token, (insight) => onInsight(insight, token));
  try {
    await follow(STREAM, token, onEvent, onState);
  } catch (error) {
    if (!(error instanceof Denied)) throw error;
    current += 1;
    sessionStorage.removeItem(TOKEN);
    at("status").dataset.state = "lost";
    at("status").textContent = "a token is needed";
    at("refused").textContent = token ? error.message : "";
    at("board").hidden = true;
    at("ask").hidden = false;
    at("token").focus();
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = at("token").value.trim();
  at("token").value = "";
  at("ask").hidden = true;
  sessionStorage.setItem(TOKEN, token);
  start(token);
});

at("window").addEventListener("change", () => {
  view.window = null;
  ask(INSIGHT, sessionStorage.getItem(TOKEN), (insight) => onInsight(insight, sessionStorage.getItem(TOKEN)));
});

start(sessionStorage.getItem(TOKEN));
