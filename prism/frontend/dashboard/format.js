// Formatting of figures.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed(unit === 0 || count >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export function percent(part) {
  if (part === null) return "–";
  const shown = part * 100;
  // 99.96 % must not be shown as 100 %.
  return `${shown === 100 ? "100" : Math.min(shown, 99.9).toFixed(1)} %`;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60
    ? `${value.toFixed(1)} s`
    : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function ago(value) {
  if (value < 1.5) return "now";
  if (value < 90) return `${Math.round(value)} s ago`;
  return value < 5400 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}
