import { axisOf } from "./axis.js";
import { formatInteger } from "./format.js";
import { hasGaps } from "./heat_data.js";
import { clamp, countAtMost } from "./scales.js";

// With more readings, drawn to scale, there is little left between them.
const MOST_READINGS = 100;
// Of all steps: readings of fewer are a few lines in an empty picture.
const SPARSE = 0.1;

// Whether a heatmap is hardly readable with its steps to scale.
function isSparse({ from, until }, lastStep) {
  const read = from.reduce((sum, step, column) => sum + until[column] - step + 1, 0);
  return from.length > 1 && from.length <= MOST_READINGS && read < SPARSE * lastStep;
}

/** Whether there is a choice: readings with steps between them, by number of step. */
export function canBeByReading(state, heat) {
  return Boolean(heat) && axisOf(state).name === "step" && hasGaps(heat);
}

/**
 * Whether the columns of a heatmap are its readings, all as wide: as chosen, or else where its
 * readings are few.
 */
export function isByReading(state, heat) {
  if (!canBeByReading(state, heat)) return false;
  return state.toScale === null ? isSparse(heat, state.runData?.last_step ?? 0) : !state.toScale;
}

/**
 * An axis on which each reading takes one unit, and what lies between two none: see `axisOf`.
 * @param {{from: number[], until: number[]}} heat
 */
function readingAxis({ from, until }) {
  const last = from.length - 1;
  return {
    name: "step",
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
  const axis = axisOf(state);
  if (!isByReading(state, heat)) return axis;
  const byReading = readingAxis(heat);
  const [start, end] = domain.map(byReading.of);
  // Zoomed in between two readings.
  return end - start < 1 ? axis : byReading;
}
