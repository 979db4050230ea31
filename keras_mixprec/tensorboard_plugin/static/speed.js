import { formatAmount } from "./format.js";
import { shortRun } from "./names.js";

// What is compared: samples if both runs have them, since batches may differ in size.
const COMPARED_BY = ["samples_per_second", "step_time"];

/**
 * A figure of how fast a run is, null if it is not known.
 * @param {any} run A run, or its row in the table of runs.
 * @param {string} name
 * @returns {number | null}
 */
export function valueOf(run, name) {
  if (!run.performance) return run[name] ?? null;
  return run.performance.figures.find((figure) => figure.name === name)?.value ?? null;
}

// What two runs are compared by; rows of the table of runs have it, too.
function speedOf(run) {
  return (run.performance ?? run).speed ?? null;
}

const UNTIMED = { what: "steps", text: "no timed step" };

/**
 * What a run has too little of to have its speed compared, `null` if it has enough.
 * @returns {{what: string, text: string} | null}
 */
export function lackOf(run) {
  const speed = speedOf(run);
  return speed ? speed.lacks : UNTIMED;
}

/**
 * How many times as fast one run is as another; null if nothing is known of one.
 * @returns {{enough: boolean, lacks: string[], ratio: number, low: number, high: number} | null}
 *   `lacks`: of each run what it has too little of, in words.
 */
export function speedRatio(run, other) {
  const speeds = [run, other].map(speedOf);
  const name = COMPARED_BY.find((one) => speeds.every((speed) => speed?.medians[one]));
  if (!name) return null;
  const lacks = speeds.map((speed) => speed.lacks?.text ?? "");
  if (lacks.some(Boolean)) return { enough: false, lacks, ratio: NaN, low: NaN, high: NaN };
  const [one, two] = speeds.map((speed) => speed.medians[name]);
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

// A ratio alone does not say which of the two it favours.
export function fasterOrSlower({ ratio }) {
  return ratio > 1 ? "faster" : "slower";
}

export function lacksInWords(lacks, names) {
  if (lacks[0] === lacks[1]) return `both have ${lacks[0]}`;
  return lacks.flatMap((lack, place) => lack ? [`${names[place]} has ${lack}`] : []).join(", ");
}

// A mean that is so many times what half of the steps take at most is that of a few slow ones.
const FEW_SLOW = 1.1;

/**
 * What is to be known of a run's figures before they are taken for its speed.
 * @returns {string[]} Sentences.
 */
export function aboutSpeed(run) {
  const [mean, half] = ["step_time", "step_time_median"].map((name) => valueOf(run, name));
  const lack = lackOf(run);
  return [
    lack?.what === "trained" ? `This run has ${lack.text}, since a step that updates no weights takes ` +
      "less time." : "",
    half !== null && mean > FEW_SLOW * half ? "The step time is the mean, which a few slow steps raise: half of " +
      `the steps took at most ${formatAmount(half, "seconds")}.` : "",
  ].filter(Boolean);
}

/**
 * How fast a run is beside another, in words, as everything on the page says it.
 * @returns {string}
 */
export function speedBeside(run, other) {
  const speed = speedRatio(run, other);
  const names = [shortRun(run.run, other.run), shortRun(other.run, run.run)];
  const [own, its] = names;
  if (speed?.enough && differs(speed)) {
    return `${own} is ${fasterOrSlower(speed)} than ${its}, at ${inTimes(speed)} its speed`;
  }
  const seen = !speed ? "speeds not known" :
    !speed.enough ? `speeds are not compared: ${lacksInWords(speed.lacks, names)}` :
      `no difference in speed seen (${timesRange(speed)})`;
  return `${own} against ${its}: ${seen}`;
}

/**
 * What memory a run takes beside another, in words: its peak if both have one, else how much
 * smaller its outputs are, which follows from their dtypes.
 * @returns {string}
 */
export function memoryBeside(run, other) {
  const peak = ratioOf(run, other, "peak_memory", (bytes) => bytes);
  if (peak !== null) return `${moreOrLess(peak)} peak memory`;
  const outputs = ratioOf(run, other, "output_bytes_saved", (share) => 1 - share);
  return "peak memory not measured" + (outputs === null || outputs === 1 ? "" :
    `; by their dtypes its layers' outputs take ${moreOrLess(outputs)}`);
}

/** How many times the peak memory of another run a run takes, null if it is not known. */
export function memoryRatio(run, other) {
  return ratioOf(run, other, "peak_memory", (bytes) => bytes);
}

function ratioOf(run, other, name, take) {
  const [own, its] = [run, other].map((data) => valueOf(data, name));
  return own === null || its === null || !(take(own) > 0 && take(its) > 0) ? null : take(own) / take(its);
}

function moreOrLess(ratio) {
  const percent = Math.round(100 * (ratio - 1));
  return percent ? `${Math.abs(percent)}\u202f% ${percent < 0 ? "less" : "more"}` : "as much";
}
