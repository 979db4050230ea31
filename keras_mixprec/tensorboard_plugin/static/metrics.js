import { formatInteger, formatNumber, formatShare } from "./format.js";

const PARTS = [
  ["activation", "Activations", "what the layer puts out"],
  ["gradient", "Gradients", "what flows back into the layer, loss scale included"],
  ["weight_gradient", "Weight gradients", "gradients of the layer's variables"],
  ["weight", "Weights", "the layer's variables"],
];

const QUANTITIES = {
  headroom_bits: [
    "headroom",
    "Powers of two between the largest magnitude and the format's maximum",
  ],
  nonfinite: ["inf and NaN", "How many elements are infinite or not a number"],
  zero: ["zeros", "Share of elements that are exactly zero"],
  subnormal: ["subnormal", "Share of elements that already lose digits"],
  below: ["vanishing", "Share of elements too small for the format: they become 0"],
};

const OWN = {
  lost_updates: [
    "Weights",
    "Weights: lost updates",
    "Share of weights whose update is too small to change them.",
  ],
  twin_forward_error: [
    "Twin against float32",
    "Twin: forward error",
    "Relative difference of the output from the same layer in float32.",
  ],
  twin_backward_error: [
    "Twin against float32",
    "Twin: backward error",
    "Relative difference of the gradient from the same layer in float32.",
  ],
};

export function describeMetric(name) {
  if (Object.hasOwn(OWN, name)) {
    const [group, label, explanation] = OWN[name];
    return { group, title: label, explanation };
  }
  for (const [part, group, meaning] of PARTS) {
    const quantity = name.startsWith(part + "_") && name.slice(part.length + 1);
    if (quantity && Object.hasOwn(QUANTITIES, quantity)) {
      const [label, explanation] = QUANTITIES[quantity];
      const title = `${group}: ${label}`;
      return { group, title, explanation: `${explanation}: ${meaning}.` };
    }
  }
  return { group: "Other", title: name.replaceAll("_", " "), explanation: "" };
}

export function groupMetrics(metrics) {
  const groups = new Map();
  for (const metric of metrics) {
    const { group } = describeMetric(metric.name);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(metric);
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
