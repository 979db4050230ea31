import { formatNumber, formatPower, momentInWords, toNumber } from "./format.js";
import { pathOfCall } from "./heat_data.js";
import { mainEvent } from "./levels.js";
import { dtypeAt } from "./precision.js";

// The next batch may be larger than any that was measured: what `diagnose` leaves too.
export const SPARE_BITS = 2;
// The loss scales to choose from, as powers of two, and the one that Keras starts at.
const SCALES = [-14, 126];
const USUAL_SCALE = 15;
const words = (name) => name.replaceAll("_", " ");

// What a plan can hold; the others are set by Keras' `quantize`.
export const PLANNED = ["float16", "bfloat16"];

// Of which reading: its name, and what it is called.
export const MOMENTS = [["worst", "worst"], ["first", "first reading"], ["last", "last reading"]];

/**
 * Whether the numbers of a part fit a format, without a loss scale.
 * @param {any} part What was measured, or nothing.
 * @param {any} format Its limits.
 * @param {string} moment `"first"`, `"last"` or `"worst"`.
 * @returns {any}
 */
export function judgePart(part, format, moment) {
  const { largest = null, low = null, largest_step: step = null } = part?.[moment] ?? {};
  if (largest === null) return { state: "unknown", bits: null, step };
  const bits = format.maximum_bits - largest;
  const vanishes = low !== null && low < format.subnormal_exponent;
  const state = bits < 0 ? "overflows" : vanishes ? "vanishes" :
    bits < SPARE_BITS ? "close" : "fits";
  return { state, bits, step, largest, low };
}

/**
 * The loss scales, as powers of two, at which gradients neither overflow nor vanish: as the
 * diagnosis has them, but that of those of weights the log does not know which small ones count.
 * @param {{largest?: number | null, low?: number | null} | undefined} reading Logarithms of
 *   the largest magnitude and of the smallest that counts of the outputs' gradients, without a loss scale.
 * @param {any} format
 * @param {{largest?: number | null}} [ofWeights] The same of the weights' gradients.
 * @returns {{lowest: number, highest: number} | null}
 */
export function scaleWindow(reading, format, ofWeights) {
  const { largest = null, low = null } = reading ?? {};
  if (largest === null) return null;
  const most = Math.max(largest, ofWeights?.largest ?? -Infinity);
  return {
    lowest: low === null ? -Infinity : format.subnormal_exponent - low,
    highest: Math.floor(format.maximum_bits - SPARE_BITS - most),
  };
}

/**
 * What a layer's numbers would do in a format.
 * @param {any} ranges What was measured of the layer.
 * @param {any} format Its limits.
 * @param {any[]} formats The limits of all.
 * @param {string} moment `"first"`, `"last"` or `"worst"`.
 * @returns {{activation: any, weight: any, gradient: any, refused: string[], state: string}}
 */
export function judgeLayer(ranges, format, formats, moment) {
  let activation = judgePart(ranges?.activation, format, moment);
  const lost = ranges?.nonfinite;
  const then = lost && formats.find((one) => one.name === lost.dtype);
  // How large a number was that became infinite is known only from a wider dtype.
  if (then && !(activation.largest > then.maximum_bits)) {
    const state = format.maximum_bits <= then.maximum_bits ? "overflows" : "unknown";
    activation = { state, bits: null, step: lost.step, lost: lost.dtype };
  }
  const weight = judgePart(ranges?.weight, format, moment);
  const gradient = scaleWindow(ranges?.gradient?.[moment], format, ranges?.weight_gradient?.[moment]);
  const refused = ranges?.refused?.[format.name] ?? [];
  const states = [
    activation.state, weight.state, refused.length ? "refused" : null,
    gradient && gradient.lowest > gradient.highest ? "no scale" : null,
  ];
  const state = GRAVE.find((one) => states.includes(one)) ?? activation.state;
  return { activation, weight, gradient, refused, state };
}

// The gravest first; what is none of them is not measured, or fits.
export const GRAVE = ["overflows", "refused", "no scale", "vanishes", "close"];

// A format as wide as float32 needs no loss scale. Where gradients overflowed in the run
// without a layer that is to blame, a plan stays below.
function possibleScales(format, overflowing) {
  if (format.name !== "float16") return [0, 0];
  const [lowest, highest] = SCALES;
  const until = overflowing === null ? highest : Math.ceil(overflowing) - 1;
  return [lowest, Math.max(lowest, Math.min(highest, until))];
}

/**
 * The loss scale that suits the layers with the most FLOPs, as a power of two.
 * @param {{window: any, cost: number}[]} layers
 * @param {number[]} possible
 * @param {number} usual Of several that suit as many, the nearest to it.
 */
function bestScale(layers, [from, until], usual = USUAL_SCALE) {
  let best = null;
  for (let bits = from; bits <= until; bits += 1) {
    const held = layers.filter(({ window }) => holds(window, bits));
    const cost = held.reduce((sum, layer) => sum + layer.cost, 0);
    const score = [cost, held.length, -Math.abs(bits - usual)];
    const place = best ? score.findIndex((value, index) => value !== best.score[index]) : 0;
    if (!best || (place >= 0 && score[place] > best.score[place])) best = { bits, score };
  }
  return best.bits;
}

/**
 * At which loss scales, as powers of two, a run took steps that were not skipped, below all at which
 * gradients alone overflowed; the largest first.
 * @param {any} run
 * @param {number | null} overflowing The least at which gradients alone overflowed.
 * @returns {{bits: number, step: number}[]}
 */
function provenScales({ scale: courses = [], last_step: last }, overflowing) {
  const taken = courses.flatMap(({ steps, scale, skipped }) => steps.flatMap((from, row) => {
    const step = steps[row + 1] ?? last;
    const lost = (skipped[row + 1] ?? skipped[row]) - skipped[row];
    return step - from > lost && scale[row] > 0 ? [{ bits: Math.floor(Math.log2(scale[row])), step }] : [];
  }));
  return taken.filter(({ bits }) => overflowing === null || bits < overflowing)
    .sort((one, two) => two.bits - one.bits);
}

// What a layer had room for in the format is no reason to start lower, as long as its gradients fit at all.
function withProven({ lowest, highest }, layer, name, proven) {
  const bits = proven.find(({ step }) => dtypeAt(layer, step) === name)?.bits ?? -Infinity;
  return { lowest, highest: Math.max(highest, Math.min(bits, highest + SPARE_BITS)) };
}

function holds(window, bits) {
  return window.lowest <= bits && bits <= window.highest;
}

// A layer may overflow on the way to an output that does not.
export function foundInWords(kinds) {
  return `the run found ${kinds.map(words).join(", ")} in it`;
}

// Zeros have no range, and yet were measured.
export function isAllZero(layer) {
  return toNumber(layer.least_headroom ?? null) === Infinity;
}

function reasonOf({ activation, weight }, name) {
  const parts = [["activations", activation], ["weights", weight]];
  for (const [what, { state, bits, step, lost }] of parts) {
    const at = step === null ? "" : ` ${momentInWords(step, "after")}`;
    if (state === "overflows") {
      return lost ? `its ${what} were not finite in ${lost}${at}` :
        `its ${what} exceed ${name} by ${formatNumber(-bits)} bits${at}`;
    }
    if (state === "close") {
      return `its ${what} have ${formatNumber(bits)} bits left in ${name}${at}`;
    }
    if (state === "vanishes") return `small ${what} that count become 0 in ${name}`;
    if (lost && state === "unknown") {
      return `its ${what} were not finite in ${lost}${at}: how large is not known`;
    }
  }
  return null;
}

/**
 * The fewest layers in float32 with which nothing that was measured leaves a format.
 * @param {any[]} layers The table of layers.
 * @param {any} ranges What was measured, with the formats.
 * @param {string} name The format of all other layers.
 * @param {any} [run] For the loss scales that it was trained with.
 */
export function smallestPlan(layers, ranges, name, run = {}) {
  const format = ranges.formats.find((one) => one.name === name);
  const judged = new Map(layers.map(({ path }) => {
    return [path, judgeLayer(ranges.layers[path], format, ranges.formats, "worst")];
  }));
  // The tuner may demote a layer before the first step.
  const beganWide = ({ dtypes, demoted_at: at = null }) => {
    return dtypes[0][1] === "float32" && at === null;
  };
  const mixed = layers.some((layer) => !beganWide(layer));
  // Of what was not finite a verdict may say how large it is in float32.
  const beyond = (path) => {
    const { state, lost } = judged.get(path).activation;
    if (!lost) return state === "overflows";
    return (ranges.layers[path].in_float32 ?? null) > format.maximum_bits;
  };
  const reasons = new Map();
  const unmeasured = [];
  // What layers would do that pass on what another made infinite, by that one.
  const behind = new Map();
  const cause = layers.findIndex(({ path }) => judged.get(path).refused.length);
  for (const [index, layer] of layers.entries()) {
    const { path } = layer;
    const own = judged.get(path);
    // Zeros behind a layer that a verdict names may be its doing.
    const unexplained = cause < 0 || index < cause;
    const feeder = (layer.fed_by ?? []).find((one) => {
      return judged.has(one) && beyond(one);
    });
    const measured = own.activation.state !== "unknown" || own.activation.lost;
    if (mixed && beganWide(layer)) {
      reasons.set(path, "it was in float32 from the beginning of the run");
    } else if (reasonOf(own, name)) reasons.set(path, reasonOf(own, name));
    else if (own.refused.length) reasons.set(path, foundInWords(own.refused));
    else if (feeder) reasons.set(path, `it receives what ${feeder} computes, beyond ${name}`);
    else if (!measured && layer.passed_from) {
      behind.set(layer.passed_from, [...behind.get(layer.passed_from) ?? [], path]);
    } else if (!measured && isAllZero(layer) && unexplained) {
      reasons.set(path, "its activations were all zero, which have no range");
    } else if (!measured) {
      unmeasured.push(path);
      if (!mixed) reasons.set(path, "nothing was measured of it");
    }
  }
  const costOf = ({ share_of_flops: share }) => share ?? 0;
  const overflowing = ranges.overflowing_scale ?? null;
  const proven = provenScales(run, overflowing);
  const windows = layers
    .filter(({ path }) => !reasons.has(path) && judged.get(path).gradient)
    .map((layer) => {
      const { gradient } = judged.get(layer.path);
      const window = withProven(gradient, layer, name, proven);
      return { ...layer, window, spare: gradient.highest, cost: costOf(layer) };
    });
  // What the run found in a layer may have skipped those steps, and is in float32 by this plan,
  // unless it was already: steps are those since dtypes last changed.
  const blamed = layers.some(({ path, repaired }) => {
    return judged.get(path).refused.length && reasons.has(path) && !repaired;
  });
  // As a verdict on the loss scale advises, where these ranges allow it.
  const advised = ranges.needed_scale ?? undefined;
  const scale = bestScale(windows, possibleScales(format, blamed ? null : overflowing), advised);
  for (const { path, window } of windows.filter((one) => !holds(one.window, scale))) {
    reasons.set(path, `at the loss scale ${formatPower(scale)} its gradients ${
      window.highest < scale ? "overflow" : "vanish"} in ${name}`);
  }
  // Whether it leaves less room than the windows do.
  const isTight = windows.some(({ path, spare }) => !reasons.has(path) && spare < scale);
  const total = layers.reduce((sum, layer) => sum + costOf(layer), 0);
  const narrow = layers.filter(({ path }) => !reasons.has(path));
  const held = narrow.reduce((sum, layer) => sum + costOf(layer), 0);
  const share = total ? held / total : NaN;
  return { name, reasons, unmeasured, behind, scale, isTight, overflowing, blamed, share };
}

/**
 * Main findings of other runs on layers of the same path that a plan leaves in 16 bits: the
 * ranges of a run in float32 do not say what overflows inside a layer.
 * @param {any[] | null} summaries The rows of the table of runs, some of them still unread.
 * @param {any} run
 * @param {{reasons: Map<string, string>}} plan
 * @returns {{layer: string, verdict: string, run: string}[]}
 */
export function foundElsewhere(summaries, run, { reasons }) {
  const paths = new Set(run.layers.map(({ path }) => path));
  return (summaries ?? []).flatMap(({ run: other, finding }) => {
    if (other === run.run || finding?.kind !== "verdict" || finding.level === "info") return [];
    // Bad data are of no layer.
    const layer = finding.layer ? pathOfCall(finding.layer, paths) : null;
    const isHeld = paths.has(layer) && !reasons.has(layer);
    return isHeld ? [{ layer, verdict: finding.verdict, run: other }] : [];
  });
}

/**
 * The loss scale of a plan, and what the run's skipped steps say of it.
 * @param {{name: string, scale: number, isTight: boolean, overflowing: number | null, blamed: boolean}} plan
 */
export function scaleInWords({ name, scale, isTight, overflowing, blamed }) {
  if (name !== "float16") return "";
  const advised = `Loss scale ${formatPower(scale)}` + (isTight ?
    `, at which this run had room, though less than ${SPARE_BITS} bits of it` : "");
  if (overflowing === null) return `${advised}.`;
  const from = formatPower(Math.ceil(overflowing));
  if (blamed) {
    return `${advised}; the run skipped steps from ${from} on, which may be due to the layers ` +
      "with a verdict.";
  }
  return scale < overflowing ? `${advised}: from ${from} on the run skipped steps.` :
    `No loss scale is known: the run skipped steps even at ${from}.`;
}

/**
 * Why no plan is offered, or null: ranges of a run that fails in float32 as well say nothing of
 * what a format would do.
 */
export function whyNoPlan(run) {
  const { verdict } = mainEvent(run) ?? {};
  return NO_MATTER[run.finding?.repaired ? null : verdict] ?? null;
}

const NO_MATTER = {
  divergence: "No plan: training diverged in float32 too, so precision is not the cause, and these " +
    "ranges say nothing about a run that does not diverge.",
  weights_lost: "No plan: weights are infinite or NaN, so these ranges say nothing about a run with " +
    "finite ones. Restore a checkpoint first.",
};

/**
 * What was measured of a layer, with what it says of one that was not finite behind another.
 * @param {any} ranges What was measured of the layer.
 * @param {any} layer Its row of the table of layers.
 */
export function withLost(ranges, layer) {
  if (layer.lost_because) return { ...ranges, nonfinite: undefined };
  const isLost = toNumber(layer.least_headroom ?? null) === -Infinity && !layer.passed;
  if (!isLost || ranges?.nonfinite) return ranges;
  const step = layer.worst_step;
  return { ...ranges, nonfinite: { step, dtype: dtypeAt(layer, step) } };
}

// As `PrecisionPlan.load` reads it.
export function planFile(layers, { name, reasons }) {
  return {
    format: "keras_mixprec.plan", version: 1, default: `mixed_${name}`,
    layers: layers.map(({ path }) => {
      const reason = reasons.get(path);
      return reason ? { path, policy: "float32", reason } : { path, policy: `mixed_${name}` };
    }),
  };
}
