// What the numbers were while this page was open, and what they changed by.

import { sum } from "./format.js";

const SPAN_S = 300;
const SHORTEST_SPAN_S = 60;
const WINDOW_S = 10; // hit rates are those of the last seconds: one second alone may have no request
const LONGEST_STEP_S = 5; // between samples; more is a gap

export class History {
  #samples = []; // {t, stats, first}: `first` after a gap
  #marks = []; // {t, text}

  /** Take in stats that arrived at `t` (seconds). */
  add(t, stats) {
    const last = this.#samples.at(-1);
    const goesOn = last && last.stats.generation === stats.generation && t - last.t < LONGEST_STEP_S;
    if (last && last.stats.generation !== stats.generation) this.#marks.push({ t, text: "restart" });
    this.#samples.push({ t, stats, first: !goesOn });
    const oldest = t - SPAN_S - WINDOW_S;
    while (this.#samples[0].t < oldest) this.#samples.shift();
    this.#marks = this.#marks.filter((mark) => mark.t >= t - SPAN_S);
  }

  get marks() {
    return this.#marks;
  }

  /** Seconds that a chart should show: what there is, within bounds. */
  get span() {
    const all = this.#samples.length ? this.#samples.at(-1).t - this.#samples[0].t : 0;
    return Math.min(SPAN_S, Math.max(SHORTEST_SPAN_S, Math.ceil(all / 60) * 60));
  }

  /** Samples without a gap between them, for each a run of {t, hot, warm, cold, shared}: shares of requested tokens. */
  hitRates() {
    const runs = [];
    this.#samples.forEach((sample, at) => {
      const rates = sample.first ? null : this.#rates(at, WINDOW_S);
      if (rates === null) {
        runs.push([]);
      } else {
        if (!runs.length) runs.push([]);
        runs.at(-1).push({ t: sample.t, ...rates });
      }
    });
    return runs.filter((run) => run.length);
  }

  /** Share of requested tokens that was served in the last `span` seconds; null if none was requested. */
  hitRate(span) {
    const rates = this.#samples.length ? this.#rates(this.#samples.length - 1, span) : null;
    return rates === null ? null : sum(rates);
  }

  /** What a counter grew by per second in the last seconds; `pick` takes it out of the stats. */
  perSecond(pick) {
    const at = this.#samples.length - 1;
    if (at < 0) return 0;
    const base = this.#base(at, WINDOW_S);
    const now = this.#samples[at];
    return now.t > base.t ? (pick(now.stats) - pick(base.stats)) / (now.t - base.t) : 0;
  }

  #rates(at, span) {
    const now = this.#samples[at].stats.counters;
    const before = this.#base(at, span).stats.counters;
    const requested = now.requested_tokens - before.requested_tokens;
    if (requested <= 0) return null;
    const share = (tier) => ((now.hit_tokens[tier] ?? 0) - (before.hit_tokens[tier] ?? 0)) / requested;
    return { hot: share("hot"), warm: share("warm"), cold: share("cold"), shared: share("shared") };
  }

  /** The earliest sample of the last `span` seconds with no gap in between. */
  #base(at, span) {
    let base = at;
    while (!this.#samples[base].first && base > 0 && this.#samples[base - 1].t >= this.#samples[at].t - span) base -= 1;
    return this.#samples[base];
  }
}
