// Numbers and times as people read them.

export const NOTHING = "–";

const DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// 3.142, 0.0123, 1.2e-5, 12,345; a dash for what is not known.
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 10_000) return whole(value);
  if (size < 1e-3) return value.toExponential(2).replace("e-", "e−");
  return DIGITS.format(value);
}

// A whole number with its thousands apart.
export function whole(value) {
  if (value === null || value === undefined) return NOTHING;
  return WHOLE.format(Math.round(value) || 0); // never -0
}

// How long ago a time was. seconds: since 1970.
export function ago(seconds) {
  if (!seconds) return NOTHING;
  return `${duration(Math.max(0, Date.now() / 1000 - seconds))} ago`;
}

// 5 s, 12 min, 3 h, 12 days
export function duration(seconds) {
  if (seconds < 90) return `${whole(seconds)} s`;
  if (seconds < 5400) return `${whole(seconds / 60)} min`;
  if (seconds < 129_600) return `${whole(seconds / 3600)} h`;
  return `${whole(seconds / 86_400)} days`;
}

export function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(1)} kB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
