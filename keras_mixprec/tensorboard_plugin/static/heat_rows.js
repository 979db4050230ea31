import { isLeftOut, originAt, pathOfCall, poolRow } from "./heat_data.js";
import { foldedBlockOf } from "./layer_blocks.js";
import { alarmLevel } from "./palette.js";
import { ownHeadroom, widerAt } from "./precision.js";

// Returns a layer for a row of the heatmap that the table of layers lacks. A search finds such a
// row only by name.
function unknown(path) {
  return { path, class: "", compute_dtype: null, verdicts: [] };
}

/**
 * Returns the rows of a heatmap: the layers in the table, with one row for each folded block.
 * @returns {{name: string, label: string, calls: number[], block: boolean}[]}
 */
export function heatRows(calls, layers, { keeps, folded }) {
  const rows = [];
  const blocks = new Map();
  calls.forEach((call, index) => {
    const path = pathOfCall(call, layers);
    if (!keeps(layers.get(path) ?? unknown(path))) return;
    const block = foldedBlockOf(path, folded);
    if (blocks.has(block)) return blocks.get(block).calls.push(index);
    const row = { name: block ?? call, label: call, calls: [index], block: block !== null };
    rows.push(row);
    if (row.block) blocks.set(block, row);
  });
  return rows;
}

// Returns the place of a layer's row, or of the folded block that contains the layer.
export function rowOfCall(rows, calls, layer) {
  const index = layer === null ? -1 : calls.indexOf(layer);
  return index < 0 ? -1 : rows.findIndex((row) => row.calls.includes(index));
}

export const GRAVEST = ["bad", "passed", "warning", "input", "quiet", "roomy", "beyond", "zero", "none"];
const [BAD, PASSED, INPUT, ZERO] = ["bad", "passed", "input", "zero"].map((level) => GRAVEST.indexOf(level));

/**
 * Returns, for each pixel, the worst value of several layers, its layer, and the rank of its level
 * in `GRAVEST`. The level is `"input"` for a non-finite batch, and `"passed"` if another layer
 * caused non-finite numbers or zeros. In all other cases, `alarmLevel` returns the level.
 * @param {any} heat
 * @param {number[]} calls
 * @param {(call: number, column: number) => boolean} isWider
 */
export function poolRows(heat, calls, pixels, kind, isWider) {
  const width = pixels.first.length;
  const values = new Float32Array(width).fill(NaN);
  const columns = new Int32Array(width).fill(-1);
  const source = new Int32Array(width).fill(-1);
  const ranks = new Uint8Array(width).fill(GRAVEST.length);
  const least = heat.pool === "min";
  for (const call of calls) {
    const found = poolRow(heat, call, pixels);
    for (let pixel = 0; pixel < width; pixel += 1) {
      let [value, column] = [found.values[pixel], found.columns[pixel]];
      const known = !Number.isNaN(value);
      let rank = known ? GRAVEST.indexOf(alarmLevel(kind, value, isWider(call, column))) : Infinity;
      if ((rank === BAD || rank === ZERO) && originAt(heat, call, column) !== null) rank = PASSED;
      if (found.bad[pixel] >= 0 && rank > INPUT) {
        [value, column, rank] = [NaN, found.bad[pixel], INPUT];
      }
      const worse = least ? value < values[pixel] : value > values[pixel];
      if (rank > ranks[pixel] || (rank === ranks[pixel] && !worse)) continue;
      [values[pixel], columns[pixel]] = [value, column];
      [source[pixel], ranks[pixel]] = [call, rank];
    }
  }
  return { values, columns, source, ranks };
}

// Returns whether a row overflows after the last repair.
export function isBadSince({ ranks, columns }, { until }, step) {
  return ranks.some((rank, pixel) => GRAVEST[rank] === "bad" && until[columns[pixel]] > step);
}

/**
 * Returns the worst value of each row and the first step with that value. `wider` is the dtype
 * of larger range that computed the value, if any. `isBad` is true if a reading was left out.
 * `origin` is a cause outside the layer.
 * @param {string} formatName The format that headroom refers to.
 * @returns {{name: string, value: number, step: number | null, wider: string | null,
 *   isBad: boolean, origin: import("./heat_data.js").Origin | null}[]}
 */
export function worstOfRows(heat, layers, choice, formatName) {
  const size = heat.from.length;
  const least = heat.pool === "min";
  const isHeadroom = heat.metric.endsWith("headroom_bits");
  return heatRows(heat.layers, layers, choice).map(({ name, calls }) => {
    let [value, own, step, wider, origin] = [NaN, NaN, null, null, null];
    for (const call of calls) {
      const layer = layers.get(pathOfCall(heat.layers[call], layers));
      for (let column = 0; column < size; column += 1) {
        const found = heat.values[call * size + column];
        if (Number.isNaN(found)) continue;
        const dtype = isHeadroom ? widerAt(layer, heat.until[column], formatName) : null;
        const compared = ownHeadroom(found, dtype, formatName);
        if (step !== null && !(least ? compared < own : compared > own)) continue;
        [value, own, step, wider] = [found, compared, heat.from[column], dtype];
        origin = originAt(heat, call, column);
      }
    }
    const isBad = calls.some((call) => isLeftOut(heat, call));
    return { name, value, step, wider, isBad, origin };
  });
}
