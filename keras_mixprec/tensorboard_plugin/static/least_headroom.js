import { formatInteger, formatNumber, toNumber } from "./format.js";
import { isWider } from "./precision.js";

const PARTS = [
  ["activations", "least_headroom", "worst_step"],
  ["gradients", "least_gradient_headroom", "worst_gradient_step"],
];

const bitsOf = (layer, key) => toNumber(layer[key] ?? null);

function spareInWords(layer, bits) {
  if (layer.inside && bits === bitsOf(layer, "least_headroom")) return "▲ overflow inside";
  if (bits === -Infinity) return "▲ not finite";
  return bits > 0 ? `${formatNumber(Number(bits.toFixed(1)))} bits` : "▲ overflow";
}

/**
 * How close a layer in 16 bits was to an overflow: the least headroom of the run, of
 * activations and of gradients.
 * @param {any} run
 * @returns {{name: string, text: string, title: string, layer: any}[]}
 */
export function leastHeadroom({ layers, format }) {
  // What a wider dtype holds is not close, nor is what comes from another layer its own.
  const own = layers.filter((layer) => {
    return !isWider(layer.compute_dtype, format?.name) && !layer.passed_from;
  });
  return PARTS.flatMap(([part, key, step]) => {
    const known = own.filter((layer) => bitsOf(layer, key) < Infinity);
    if (!known.length) return [];
    const worst = known.reduce((one, two) => bitsOf(two, key) < bitsOf(one, key) ? two : one);
    const scaled = part === "gradients" ? ", loss scale included, without skipped steps" : "";
    return [{
      name: `least headroom, ${part}`, text: spareInWords(worst, bitsOf(worst, key)), layer: worst,
      title: `${worst.path}, step ${formatInteger(worst[step])}${scaled}: the least since dtypes last changed`,
    }];
  });
}

/**
 * The least headroom of a layer's gradients in words, empty if it was not measured.
 * @param {any} layer
 */
export function gradientHeadroomInWords(layer) {
  const bits = bitsOf(layer ?? {}, "least_gradient_headroom");
  if (!Number.isFinite(bits)) return "";
  return `least headroom of the run: ${spareInWords(layer, bits)}, step ${formatInteger(layer.worst_gradient_step)}; `;
}
