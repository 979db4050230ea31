import { formatInteger } from "./format.js";
import { clamp, countAtMost, linearScale } from "./scales.js";

/**
 * The cause of a cell in words, if the cause is outside the cell's layer.
 * @typedef {{long: string, short: string}} Origin
 */

// The mark of a cell whose reading is on a non-finite batch.
export const LEFT_OUT = 65535;

export function decodeHeat(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  const head = JSON.parse(text);
  const count = head.layers.length * head.from.length;
  // The data is little-endian, as are all machines that run browsers.
  const values = new Float32Array(buffer, 4 + length, count);
  return { ...head, values, marks: head.marked ? new Uint16Array(buffer, 4 + length + 4 * count, count) : null };
}

/** Returns whether any reading of a row, or of all rows, is left out. */
export function isLeftOut({ marks, from }, row = null) {
  const own = row === null ? marks : marks?.subarray(row * from.length, (row + 1) * from.length);
  return Boolean(own?.includes(LEFT_OUT));
}

/**
 * Returns the cause of a cell if it is another layer or the run as a whole.
 * @returns {Origin | null}
 */
export function originAt({ marks, origins, from }, row, column) {
  return (marks && origins[marks[row * from.length + column] - 1]) ?? null;
}

// Returns whether heat belongs to a run. The previous run's heat stays until the chosen run's
// heat is loaded.
export function isOfRun(heat, data) {
  return Boolean(heat && data && heat.run === data.run);
}

/**
 * Returns the scale of a heatmap's columns. A column is one reading, or several in a long run. All
 * columns have the same width, because nothing is known about the steps between two readings.
 * @param {{from: number[], until: number[]}} heat
 * @param {number[]} domain The first and the last step in view.
 * @param {[number, number]} range In pixels.
 */
export function columnScale({ from, until }, domain, range) {
  const last = from.length - 1;
  const of = (step) => {
    const column = columnAt(from, step);
    const [low, high] = [from[column] - 0.5, until[column] + 0.5];
    return column + clamp((step - low) / (high - low), 0, 1);
  };
  const [start, end] = domain.map(of);
  const inner = linearScale(end > start ? [start, end] : [Math.floor(start), Math.floor(start) + 1], range);
  const scale = (step) => inner(of(step));
  scale.place = inner.invert;
  scale.invert = (pixel) => {
    const place = inner.invert(pixel);
    const column = clamp(Math.floor(place), 0, last);
    return from[column] - 0.5 + (place - column) * (until[column] - from[column] + 1);
  };
  // Returns the centers of some columns, with their steps.
  scale.ticks = (count) => {
    const [first, final] = range.map(inner.invert);
    const stride = Math.max(1, Math.ceil((final - first) / count));
    return from.map((step, column) => [column + 0.5, step])
      .filter(([middle], column) => column % stride === 0 && middle > first && middle < final)
      .map(([middle, step]) => [inner(middle), formatInteger(step)]);
  };
  return scale;
}

/** Returns the column of a step, or the nearest column before it. */
export function columnAt(from, step) {
  return Math.max(0, countAtMost(from, step) - 1);
}

/**
 * Returns the first and the last column under each pixel.
 * @param {(pixel: number) => number} place Returns the fractional column at a pixel.
 */
export function columnsOfPixels(place, columns, width) {
  const first = new Int32Array(width);
  const last = new Int32Array(width);
  for (let pixel = 0; pixel < width; pixel += 1) {
    first[pixel] = clamp(Math.floor(place(pixel)), 0, columns - 1);
    last[pixel] = clamp(Math.ceil(place(pixel + 1)) - 1, first[pixel], columns - 1);
  }
  return { first, last };
}

// Returns, for each pixel, the worst value, its column, and a column with bad input.
export function poolRow(heat, row, pixels) {
  const width = pixels.first.length;
  const size = heat.from.length;
  const values = new Float32Array(width).fill(NaN);
  const columns = new Int32Array(width).fill(-1);
  const bad = new Int32Array(width).fill(-1);
  const least = heat.pool === "min";
  for (let pixel = 0; pixel < width; pixel += 1) {
    let worst = NaN;
    for (let at = pixels.first[pixel]; at <= pixels.last[pixel]; at += 1) {
      const value = heat.values[row * size + at];
      if (heat.marks?.[row * size + at] === LEFT_OUT) bad[pixel] = at;
      if (Number.isNaN(value)) continue;
      if (Number.isNaN(worst) || (least ? value < worst : value > worst)) {
        worst = value;
        columns[pixel] = at;
      }
    }
    values[pixel] = worst;
  }
  return { values, columns, bad };
}

// Returns the last step with any value, or null.
export function lastMeasured(heat) {
  const size = heat?.until.length ?? 0;
  for (let column = size - 1; column >= 0; column -= 1) {
    const some = heat.layers.some((_, row) => !Number.isNaN(heat.values[row * size + column]));
    if (some) return heat.until[column];
  }
  return null;
}

// Returns the layer of a call. The calls "path" and "path#1" belong to the layer `path`.
export function pathOfCall(call, paths) {
  return paths.has(call) ? call : call.replace(/#\d+$/, "");
}

export function rowOfLayer(layers, layer) {
  return layer === null ? -1 : layers.indexOf(layer);
}
