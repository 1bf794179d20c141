// Numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(value) {
  return whole.format(value);
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function rate(value) {
  return `${bytes(value)}/s`;
}

/** A share between 0 and 1; null is unknown. */
export function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function seconds(value) {
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

export function ago(value) {
  return value === null ? "never" : value < 1 ? "now" : `${seconds(Math.floor(value)).replace(".0 s", " s")} ago`;
}

export function clock(epoch) {
  return new Date(1000 * epoch).toLocaleTimeString([], { hour12: false });
}

/** Words that the daemon writes with underscores. */
export function words(name) {
  return name.replaceAll("_", " ").replaceAll("-", " ");
}

export function sum(map) {
  return Object.values(map ?? {}).reduce((total, value) => total + value, 0);
}
