import { hasBadInput, mainFinding, momentOf } from "./event_text.js";
import { formatNumber, momentInWords, plural, toNumber } from "./format.js";
import { alarmLevel } from "./palette.js";
import { originOf } from "./passed_on.js";
import { changedAt, isWider } from "./precision.js";

const PARTS = [
  ["activations", "least_headroom", "worst_step"],
  ["gradients", "least_gradient_headroom", "worst_gradient_step"],
];

// What was found beyond a format, although readings of the part may look safe.
const OVERFLOWS = {
  activations: ["forward_overflow", "cast_overflow", "weight_overflow"],
  gradients: ["backward_overflow"],
};

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

// A verdict that still holds on one of these layers; a forecast is none yet.
function overflowFound({ events }, part, own) {
  const layers = new Map(own.map((layer) => [layer.path, layer]));
  return events.findLast(({ kind, verdict, layer, step, numbers }) => {
    return kind === "verdict" && OVERFLOWS[part].includes(verdict) && layers.has(layer) &&
      numbers?.overflows_in_steps === undefined && step > changedAt(layers.get(layer));
  });
}

// Steps skipped behind a reading, at which the part was not finite: it had less left than was read.
function skippedSince({ events }, part, step) {
  return events.filter((event) => event.kind === "skipped_step" && momentOf(event) > step &&
    !hasBadInput(event) && (part === "gradients" || event.loss?.length)).length;
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
    return !isWider(layer.compute_dtype, format?.name) && !originOf(layer);
  });
  const because = layers.find((layer) => layer.lost_because)?.lost_because;
  return PARTS.flatMap(([part, key, step]) => {
    const name = `least headroom, ${part}`;
    if (part === "gradients" && run.stuck) return [overflowing(run, name)];
    const known = own.filter((layer) => bitsOf(layer, key) < Infinity);
    if (!known.length) {
      return because && part === "activations" ? [{
        name, text: "▲ not finite", level: "bad", event: mainFinding(run), title: `in all layers, because ${because}`,
      }] : [];
    }
    const worst = known.reduce((one, two) => bitsOf(two, key) < bitsOf(one, key) ? two : one);
    const scaled = part === "gradients" ? ", loss scale included, of finite readings" : "";
    const bits = bitsOf(worst, key);
    const level = alarmLevel("headroom", bits);
    const title = `${worst.path}, ${momentInWords(worst[step], "after")}${scaled}: the least since dtypes last changed`;
    const found = level === "bad" ? undefined : overflowFound(run, part, own);
    if (found) {
      return [{
        name, text: "▲ overflow found", level: "bad", event: found,
        title: `overflow found in ${found.layer}, ${momentInWords(momentOf(found))}, which readings do not show. ` +
          `They are ${spareInWords(worst, bits)} at least: ${title}`,
      }];
    }
    const skips = skippedSince(run, part, worst[step]);
    const after = skips ? `. ${plural(skips, "step")} behind that reading overflowed and ${skips > 1 ? "were" : "was"} skipped` : "";
    return [{
      name, text: spareInWords(worst, bits) + (skips && level !== "bad" ? ", then overflow" : ""), layer: worst,
      level: ["bad", "warning"].includes(level) ? level : skips ? "skip" : undefined,
      title: title + after,
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
  return `least headroom of this layer's gradients: ${spareInWords(layer, bits)}, ${momentInWords(layer.worst_gradient_step, "after")}; `;
}
