import { formatInteger, formatSeconds, momentInWords } from "./format.js";
import { clamp, countAtMost, linearScale, niceTicks } from "./scales.js";

// With more readings, drawn to scale, there is little left between them.
const MOST_READINGS = 100;
// Of all steps: readings of fewer are a few lines in an empty picture.
const SPARSE = 0.1;

export const BY_STEP = {
  of: (step) => step, stepAt: (value) => value, ticks: niceTicks, label: formatInteger,
};

// From steps to pixels and back, as `linearScale` is from values.
export function stepScale(axis, domain, range) {
  const inner = linearScale(domain.map(axis.of), range);
  const scale = (step) => inner(axis.of(step));
  scale.invert = (position) => axis.stepAt(inner.invert(position));
  return scale;
}

/** Whether the columns of a heatmap are its readings, all as wide, since there are few. */
export function isByReading(state, heat) {
  const { from, until } = heat ?? { from: [], until: [] };
  const read = from.reduce((sum, step, column) => sum + until[column] - step + 1, 0);
  return from.length > 1 && from.length <= MOST_READINGS && read < SPARSE * (state.runData?.last_step ?? 0);
}

// On it each reading takes one unit, and what lies between two none.
function readingAxis({ from, until }) {
  const last = from.length - 1;
  return {
    of(step) {
      const column = clamp(countAtMost(from, step) - 1, 0, last);
      const [low, high] = [from[column] - 0.5, until[column] + 0.5];
      return column + clamp((step - low) / (high - low), 0, 1);
    },
    stepAt(place) {
      const column = clamp(Math.floor(place), 0, last);
      return from[column] - 0.5 + (place - column) * (until[column] - from[column] + 1);
    },
    ticks(start, end, count) {
      // Twice as many as on a line: each is of a column.
      const stride = Math.max(1, Math.ceil((end - start) / (2 * count)));
      const columns = Array.from({ length: last + 1 }, (_, column) => column + 0.5);
      return columns.filter((place, column) => column % stride === 0 && place > start && place < end);
    },
    label: (place) => formatInteger(from[clamp(Math.floor(place), 0, last)]),
  };
}

/**
 * What the columns of a heatmap are placed by.
 * @param {any} state
 * @param {any} heat
 * @param {number[]} domain The first and the last step in view.
 */
export function heatAxis(state, heat, domain) {
  if (!isByReading(state, heat)) return BY_STEP;
  const byReading = readingAxis(heat);
  const [start, end] = domain.map(byReading.of);
  // Zoomed in between two readings.
  return end - start < 1 ? BY_STEP : byReading;
}

/** The last step of the runs that are shown. */
export function lastStepOf({ runData, compareData }) {
  return Math.max(runData?.last_step ?? 0, compareData?.last_step ?? 0);
}

/** A step in words, with the time of training until then as far as the log has it. */
export function stepInWords(data, step, at = "") {
  const words = momentInWords(step, at);
  const { steps = [], values } = data?.time ?? {};
  const place = countAtMost(steps, step) - 1;
  if (place < 0) return words;
  const next = Math.min(place + 1, steps.length - 1);
  const share = (Math.min(step, steps[next]) - steps[place]) / (steps[next] - steps[place] || 1);
  return `${words} · ${formatSeconds(values[place] + share * (values[next] - values[place]))} of training`;
}
