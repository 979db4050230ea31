import { isOfRun, rowOfLayer } from "./heat_data.js";
import { histogramAt } from "./histogram_data.js";

// Returns the median magnitude as a power of two.
function medianOf(bars) {
  const total = bars.reduce((sum, bar) => sum + bar.count, 0);
  let below = 0;
  for (const bar of bars) {
    below += bar.count;
    if (below >= total / 2) return bar.exponent;
  }
  return null;
}

// Returns the headroom of the shown part, which the heatmap may have loaded already.
export function headroomOfPart({ part, metric, heat, partHeat, runData }) {
  const wanted = `${part}_headroom_bits`;
  const own = metric === wanted ? heat : partHeat;
  return own?.metric === wanted && isOfRun(own, runData) ? own : null;
}

/**
 * Returns the range of a layer's numbers by step, as powers of two.
 * @param {any} heat Headroom of all layers by step.
 * @param {any} histogram Exponents of the layer by step.
 * @param {string} layer
 * @param {number} limit The logarithm of the format's maximum, to which headroom refers.
 * @returns {{largest: number[][], median: number[][], smallest: number[][],
 *   nonfinite: number[], readings: number}} `nonfinite` has the steps with infinite or NaN
 *   numbers. `readings` counts the readings in the heatmap and the histogram.
 */
export function courseOf(heat, histogram, layer, limit) {
  const row = heat ? rowOfLayer(heat.layers, layer) : -1;
  const size = heat?.from.length ?? 0;
  const largest = [];
  const infinite = new Set();
  let readings = size;
  for (let column = 0; row >= 0 && column < size; column += 1) {
    const bits = heat.values[row * size + column];
    if (Number.isFinite(bits)) largest.push([heat.until[column], limit - bits]);
    else if (bits === -Infinity) infinite.add(heat.until[column]);
  }
  const median = [];
  const smallest = [];
  for (const step of histogram?.steps ?? []) {
    const { bars, nonfinite: share } = histogramAt(histogram, step);
    // In a long log, a column pools several readings and has the step of the last one.
    const column = heat?.until.findIndex((until) => until >= step) ?? -1;
    if (column < 0) readings += 1;
    if (share > 0 && !infinite.has(heat?.until[column])) infinite.add(step);
    if (!bars.length) continue;
    median.push([step, medianOf(bars)]);
    smallest.push([step, bars[0].exponent]);
  }
  const nonfinite = [...infinite].sort((one, other) => one - other);
  return { largest, median, smallest, nonfinite, readings };
}
