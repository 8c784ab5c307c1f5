// Counters of the frontends from /metrics, and their growth over a window.

export const NAMES = ["prism_requests_total", "prism_output_tokens_total", "prism_slo_total"];
const KEPT_MS = 5 * 60_000;
const LINE = /^(\w+)\{(.*)\} (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Parses text for Prometheus to a Map of a series' name and labels -> {name, labels, value}. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of match[2].matchAll(LABEL)) labels[name] = unescaped(value);
    found.set(`${match[1]}{${match[2]}`, { name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

function unescaped(value) {
  return value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
}

/** Returns a Map of frontend -> the series of the first sample that has the frontend. */
function firstOfEach(samples) {
  const found = new Map();
  for (const { series } of samples)
    for (const { labels } of series.values())
      if (!found.has(labels.frontend)) found.set(labels.frontend, series);
  return found;
}

/** Samples of the last five minutes, with times in ms. */
export class History {
  #samples = []; // {ms, series}

  add(ms, series) {
    this.#samples.push({ ms, series });
    while (this.#samples[0].ms < ms - KEPT_MS) this.#samples.shift();
  }

  /** Returns the growth of the series that `wanted` accepts, and the seconds in which it happened.
   * A counter that fell restarted at 0 with its frontend. A frontend that is missing at first,
   * because it is new or did not answer in time, counts from its first sample. */
  growth(wanted, windowMs = KEPT_MS) {
    const last = this.#samples.at(-1);
    if (!last) return { count: 0, seconds: 0 };
    const within = this.#samples.filter((sample) => sample.ms >= last.ms - windowMs);
    const [first] = within;
    const firsts = firstOfEach(within);
    let count = 0;
    for (const [key, { name, labels, value }] of last.series) {
      if (!wanted(name, labels)) continue;
      const before = firsts.get(labels.frontend).get(key)?.value ?? 0;
      count += value < before ? value : value - before;
    }
    return { count, seconds: (last.ms - first.ms) / 1000 };
  }

  /** Returns the rate per second over the last `windowMs`, or null before the second sample. */
  rate(name, model, windowMs) {
    const wanted = (other, labels) => other === name && (model === null || labels.model === model);
    const { count, seconds } = this.growth(wanted, windowMs);
    return seconds > 0 ? count / seconds : null;
  }

  /** Returns {part, since}: the part of requests that met their SLO in the last five minutes, or
   * since the frontends started if none ended in that time. part is null if none ended at all. */
  attainment(slo, model) {
    const judged = (met) => (name, labels) =>
      name === "prism_slo_total" &&
      labels.slo === slo &&
      labels.met === met &&
      (model === null || labels.model === model);
    let [met, missed] = ["true", "false"].map((each) => this.growth(judged(each)).count);
    const since = met + missed > 0 ? "in the last 5 minutes" : "since the frontends started";
    if (met + missed === 0)
      [met, missed] = ["true", "false"].map((each) => this.#total(judged(each)));
    return { part: met + missed > 0 ? met / (met + missed) : null, since };
  }

  #total(wanted) {
    const series = this.#samples.at(-1)?.series.values() ?? [];
    return [...series].reduce((sum, s) => sum + (wanted(s.name, s.labels) ? s.value : 0), 0);
  }
}
