import { mainFinding } from "./event_text.js";
import { formatNumber, momentInWords, plural, toNumber } from "./format.js";
import { alarmLevel } from "./palette.js";
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
 * A search for the loss scale skips steps that are left out; these are no search any more.
 * @returns {any}
 */
function overflowing(run, name) {
  return {
    name, text: "▲ not finite", level: "bad", event: mainFinding(run),
    title: `infinite or NaN in the last ${plural(run.stuck, "step")}, which were skipped`,
  };
}

/**
 * How close a layer in 16 bits was to an overflow: the least headroom of the run, of
 * activations and of gradients.
 * @param {any} run
 * @returns {{name: string, text: string, title: string, level?: string, layer?: any, event?: any}[]}
 */
export function leastHeadroom(run) {
  const { layers, format } = run;
  // What a wider dtype holds is not close, nor is what comes from another layer its own.
  const own = layers.filter((layer) => {
    return !isWider(layer.compute_dtype, format?.name) && !layer.passed_from;
  });
  return PARTS.flatMap(([part, key, step]) => {
    const name = `least headroom, ${part}`;
    if (part === "gradients" && run.stuck) return [overflowing(run, name)];
    const known = own.filter((layer) => bitsOf(layer, key) < Infinity);
    if (!known.length) return [];
    const worst = known.reduce((one, two) => bitsOf(two, key) < bitsOf(one, key) ? two : one);
    const scaled = part === "gradients" ? ", loss scale included, of finite readings" : "";
    const bits = bitsOf(worst, key);
    const level = alarmLevel("headroom", bits);
    return [{
      name, text: spareInWords(worst, bits), layer: worst,
      level: ["bad", "warning"].includes(level) ? level : undefined,
      title: `${worst.path}, ${momentInWords(worst[step], "after")}${scaled}: the least since dtypes last changed`,
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
  return `least headroom of the run: ${spareInWords(layer, bits)}, ${momentInWords(layer.worst_gradient_step, "after")}; `;
}
