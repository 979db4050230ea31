import { plural } from "./format.js";

// Fewer steps, or readings of them, say nothing of the next ones.
const LEAST_STEPS = 20;
const LEAST_READINGS = 5;
// A median is within so many quartile ranges, over the root of their number, in 95 of 100
// samples: the notch of a box plot (McGill, Tukey and Larsen, 1978).
const NOTCH = 1.57;

// A figure of how fast a run is, null if it is not known.
export function valueOf(run, name) {
  const figures = run.performance?.figures ?? [];
  return figures.find((figure) => figure.name === name)?.value ?? null;
}

function quantile(rising, share) {
  const place = share * (rising.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, rising.length - 1);
  return rising[below] + (place - below) * (rising[above] - rising[below]);
}

function readingsOf(run, name) {
  const figure = run.performance?.figures.find((one) => one.name === name);
  return (figure?.values ?? []).filter((value) => value > 0);
}

/**
 * Of what a run has too few to compare its speed, and how many it needs; empty if it has enough.
 * @param {any} run
 * @param {string} name The figure that is compared.
 */
function lackInWords(run, name) {
  const steps = valueOf(run, "measured_steps") ?? 0;
  if (steps < LEAST_STEPS) return `${plural(steps, "step")} measured, ${LEAST_STEPS} are needed`;
  const { length } = readingsOf(run, name);
  return length < LEAST_READINGS ?
    `${plural(length, "reading")} of the time of a step, ${LEAST_READINGS} are needed` : "";
}

// The median of a figure's readings, and how far off it may be; null of too few.
function medianOfReadings(run, name) {
  if (lackInWords(run, name)) return null;
  const known = readingsOf(run, name);
  const rising = known.toSorted((one, other) => one - other);
  const spread = quantile(rising, 0.75) - quantile(rising, 0.25);
  return { median: quantile(rising, 0.5), off: NOTCH * spread / Math.sqrt(rising.length) };
}

/**
 * How many times as fast one run is as another, by samples if both have them, since
 * batches may differ in size; null if nothing is known of one.
 * @returns {{enough: boolean, lacks: string[], ratio: number, low: number, high: number} | null}
 *   `lacks`: of each run what it has too few of, in words.
 */
export function speedRatio(run, other) {
  const runs = [run, other];
  const has = (name) => runs.every((data) => valueOf(data, name) > 0);
  const name = ["samples_per_second", "step_time"].find(has);
  if (!name) return null;
  const [one, two] = runs.map((data) => medianOfReadings(data, name));
  const lacks = runs.map((data) => lackInWords(data, name));
  if (!one || !two) return { enough: false, lacks, ratio: NaN, low: NaN, high: NaN };
  const [fast, slow] = name === "step_time" ? [two, one] : [one, two];
  return {
    enough: true, lacks, ratio: fast.median / slow.median,
    low: Math.max(0, fast.median - fast.off) / (slow.median + slow.off),
    high: (fast.median + fast.off) / Math.max(slow.median - slow.off, 0),
  };
}

// Whether more than chance tells the two apart.
export function differs({ low, high }) {
  return low > 1 || high < 1;
}

function times(ratio) {
  return Number.isFinite(ratio) ? `${ratio.toPrecision(ratio < 10 ? 2 : 3)}x` : "∞";
}

export function timesRange({ low, high }) {
  return `${times(low)} to ${times(high)}`;
}

export function inTimes(speed) {
  return `${times(speed.ratio)} (${timesRange(speed)})`;
}
