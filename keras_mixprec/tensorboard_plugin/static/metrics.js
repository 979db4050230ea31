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

// `wider`: the dtype of more range than the format's that it was computed in.
export function valueInWords(kind, value, wider = null, formatName = "16 bits") {
  if (Number.isNaN(value)) return "not measured";
  if (kind === "headroom") return headroomInWords(value, wider, formatName);
  if (kind === "count") {
    return value > 0 ? `${formatInteger(value)} not finite` : "all finite";
  }
  if (kind === "share") return `${formatShare(value)} of elements`;
  return `relative error ${formatNumber(value)}`;
}
