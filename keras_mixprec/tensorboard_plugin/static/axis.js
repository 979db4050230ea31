import { formatInteger, formatNumber, momentInWords } from "./format.js";
import { countAtMost, linearScale, niceTicks } from "./scales.js";

const AXES = ["step", "epoch", "time"];
const ABSENT = {
  epoch: "no end of an epoch in this log", time: "no times in this log",
};
const COMPARED = "not in both logs";

const SECONDS = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
  3600, 7200, 14400, 21600, 43200, 86400,
];
const DAY = 86400;

// 1 h 5 min, of seconds of which no more digits count than that.
export function formatTime(seconds) {
  if (seconds < 60) return `${formatNumber(Number(seconds.toPrecision(3)))} s`;
  const [size, unit, small, part] = seconds < 3600 ? [60, "min", 1, "s"] :
    seconds < DAY ? [3600, "h", 60, "min"] : [DAY, "d", 3600, "h"];
  const count = Math.round(seconds / small) * small;
  const rest = Math.round((count % size) / small);
  return `${Math.floor(count / size)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

// A line through points whose steps and values both rise, and on beyond its ends.
function interpolated(from, to, value) {
  const place = Math.min(Math.max(countAtMost(from, value) - 1, 0), from.length - 2);
  const share = (value - from[place]) / (from[place + 1] - from[place]);
  return to[place] + share * (to[place + 1] - to[place]);
}

function timeTicks(from, until, count) {
  const size = SECONDS.find((seconds) => (until - from) / seconds <= count);
  if (!size) return niceTicks(from / DAY, until / DAY, count).map((day) => day * DAY);
  const first = Math.ceil(from / size);
  const ticks = Array.from({ length: Math.floor(until / size) - first + 1 });
  return ticks.map((_, place) => (first + place) * size);
}

export const BY_STEP = {
  name: "step", of: (step) => step, stepAt: (value) => value, ticks: niceTicks,
  label: formatInteger,
};

/**
 * What the steps of a run are placed by, the shown one's if none is given.
 * @returns {{name: string, of: (step: number) => number, stepAt: (value: number) => number,
 *   ticks: (from: number, until: number, count: number) => number[],
 *   label: (value: number) => string}}
 */
export function axisOf({ axis, runData, compareData }, data = runData) {
  const points = data?.clock?.[axis];
  if (!points || (compareData && !inBoth(axis, runData, compareData))) return BY_STEP;
  const { steps, values } = points;
  return {
    name: axis,
    of: (step) => interpolated(steps, values, step),
    stepAt: (value) => interpolated(values, steps, value),
    ticks: axis === "time" ? timeTicks : niceTicks,
    label: axis === "time" ? formatTime : formatNumber,
  };
}

function inBoth(axis, ...runs) {
  return runs.every((data) => data?.clock?.[axis]);
}

/**
 * Two runs take a step at different times, and in different epochs: which step of the shown run
 * another's is beside, and the other way round.
 * @returns {{toShown: (step: number) => number, toOwn: (step: number) => number}}
 */
export function alignedSteps(state, data) {
  const [shown, own] = [axisOf(state), axisOf(state, data)];
  const same = (step) => step;
  if (data === state.runData || shown === BY_STEP) return { toShown: same, toOwn: same };
  return {
    toShown: (step) => shown.stepAt(own.of(step)), toOwn: (step) => own.stepAt(shown.of(step)),
  };
}

/**
 * A scale of the shown run's steps, which it has as `base`, for those of another run.
 */
export function alignedScale(state, data, base) {
  const { toShown, toOwn } = alignedSteps(state, data);
  const scale = (step) => base(toShown(step));
  return Object.assign(scale, { base, toShown, toOwn, invert: (place) => toOwn(base.invert(place)) });
}

/** The last step of the shown run, or that beside the last of the other one. */
export function lastStepOf(state) {
  const { runData, compareData } = state;
  const other = compareData ? alignedSteps(state, compareData).toShown(compareData.last_step) : 0;
  return Math.max(runData?.last_step ?? 0, other);
}

/**
 * The axes there are, each with why it cannot be chosen, if so.
 * @returns {{name: string, why: string | null}[]}
 */
export function axesOf({ runData, compareData }) {
  return AXES.map((name) => {
    if (name === "step") return { name, why: null };
    if (!compareData) return { name, why: inBoth(name, runData) ? null : ABSENT[name] };
    return { name, why: inBoth(name, runData, compareData) ? null : COMPARED };
  });
}

// From steps to pixels and back, as `linearScale` is from values.
export function stepScale(axis, domain, range) {
  const inner = linearScale(domain.map(axis.of), range);
  const scale = (step) => inner(axis.of(step));
  scale.invert = (position) => axis.stepAt(inner.invert(position));
  return scale;
}

// The step in words, after it for a reading, and where it is on another axis.
export function stepInWords(axis, step, at = "") {
  const words = momentInWords(step, at);
  if (axis.name === "step") return words;
  const value = Math.max(0, axis.of(step));
  if (axis.name === "time") return `${words} · ${formatTime(value)} of training`;
  return `${words} · epoch ${formatNumber(Number(value.toFixed(2)))}`;
}
