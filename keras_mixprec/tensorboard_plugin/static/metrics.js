import { formatInteger, formatNumber, formatShare } from "./format.js";

// Title, group and explanation come with the data, from the table of metrics.
export function groupMetrics(metrics) {
  const groups = new Map();
  for (const metric of metrics) {
    if (!groups.has(metric.group)) groups.set(metric.group, []);
    groups.get(metric.group).push(metric);
  }
  return groups;
}

function headroomInWords(value, wider, formatName) {
  if (value === -Infinity) return "overflow: infinite or NaN values";
  const bits = formatNumber(Number(Math.abs(value).toFixed(1)));
  if (value === Infinity) return "all values are zero";
  if (value > 0) return `${bits} bits below the maximum`;
  if (wider) return `${bits} bits beyond ${formatName}, computed in ${wider}`;
  return `overflow: ${bits} bits too large`;
}

// By the unit of a metric: a number of it in words.
export const WORDS = {
  headroom: headroomInWords,
  count: (value) => (value > 0 ? `${formatInteger(value)} not finite` : "all finite"),
  share: (value) => value === Infinity ? "all values are zero" : `${formatShare(value)} of elements`,
  error: (value) => `relative error ${formatNumber(value)}`,
  magnitude: (value) => value === Infinity ? "not finite" : `at most ${formatNumber(value)}`,
};

// `wider`: the dtype of more range than the format's that it was computed in.
export function valueInWords(kind, value, wider = null, formatName = "16 bits") {
  return Number.isNaN(value) ? "not measured" : WORDS[kind](value, wider, formatName);
}
