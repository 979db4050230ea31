import { countAtMost } from "./scales.js";

// The float32 numbers that the 65,536 bit patterns of float16 stand for.
let halfFloats = null;

function floatOfHalf(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (fraction ? NaN : Infinity) :
    exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24;
  return bits >> 15 ? -size : size;
}

// Of two million numbers loops take a tenth of the time of `Float32Array.from`.
function floatsOfHalves(halves) {
  halfFloats ??= Float32Array.from({ length: 65536 }, (_, bits) => floatOfHalf(bits));
  const values = new Float32Array(halves.length);
  for (let index = 0; index < halves.length; index += 1) values[index] = halfFloats[halves[index]];
  return values;
}

// bfloat16 is the upper half of float32.
function floatsOfUpperHalves(halves) {
  const bits = new Uint32Array(halves.length);
  for (let index = 0; index < halves.length; index += 1) bits[index] = halves[index] << 16;
  return new Float32Array(bits.buffer);
}

export function decodeHeat(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  const head = JSON.parse(text);
  const count = head.layers.length * head.from.length;
  // Little-endian, as every machine is that browsers run on.
  const halves = new Uint16Array(buffer, 4 + length, count);
  const decode = head.dtype === "float16" ? floatsOfHalves : floatsOfUpperHalves;
  const { rows, columns } = head.bad_input;
  const badInput = { rows: new Set(rows), columns: new Set(columns) };
  return { ...head, badInput, values: decode(halves) };
}

// Whether a reading of a layer is left out because the batch was not finite.
function isBadInput({ badInput }, row, column) {
  return Boolean(badInput?.columns.has(column) && badInput.rows.has(row));
}

// Until that of the chosen run is here, what is shown is still of another.
export function isOfRun(heat, data) {
  return Boolean(heat && data && heat.run === data.run);
}

// Columns meet half-way, so a run measured every 50 steps leaves no gaps.
export function columnEdges(from, until) {
  const last = from.length - 1;
  if (last < 0) return [];
  const edges = [];
  for (let column = 0; column < last; column += 1) {
    edges.push((until[column] + from[column + 1]) / 2);
  }
  const half = last > 0 ? (from[1] - until[0]) / 2 : 0.5;
  return [from[0] - half, ...edges, until[last] + half];
}

export function columnAt(edges, step) {
  const column = countAtMost(edges, step) - 1;
  return column >= 0 && column < edges.length - 1 ? column : -1;
}

// First and last column under each pixel; -1 where nothing was measured.
export function columnsOfPixels(edges, scale, width) {
  const first = new Int32Array(width).fill(-1);
  const last = new Int32Array(width).fill(-1);
  const columns = edges.length - 1;
  for (let pixel = 0; pixel < width; pixel += 1) {
    const from = scale.invert(pixel);
    const until = scale.invert(pixel + 1);
    if (columns < 1 || until <= edges[0] || from >= edges[columns]) continue;
    first[pixel] = Math.max(0, columnAt(edges, Math.max(from, edges[0])));
    const end = columnAt(edges, until);
    const touches = end >= 0 && edges[end] === until && end > first[pixel];
    last[pixel] = end < 0 ? columns - 1 : end - (touches ? 1 : 0);
  }
  return { first, last };
}

// How far a reading is drawn on both sides, in pixels: it stays visible however narrow.
const REACH = 1;

/**
 * Which pixels lie between two readings, at steps of which nothing is known.
 * @param {{from: number[], until: number[]}} heat
 * @param {{first: Int32Array, last: Int32Array}} pixels What is nearest to each.
 * @param {{invert: (pixel: number) => number}} scale
 */
export function unreadPixels({ from, until }, { first, last }, scale) {
  return Uint8Array.from(first, (column, pixel) => {
    if (column < 0) return 0;
    const [low, high] = [scale.invert(pixel - REACH), scale.invert(pixel + 1 + REACH)];
    for (let at = column; at <= last[pixel]; at += 1) {
      if (from[at] - 0.5 < high && until[at] + 0.5 > low) return 0;
    }
    return 1;
  });
}

// Whether there are steps between the readings.
export function hasGaps({ from, until }) {
  return from.some((step, column) => column > 0 && step - until[column - 1] > 1);
}

// The worst value under each pixel, the column that it is from, and one with bad input.
export function poolRow(heat, row, pixels) {
  const width = pixels.first.length;
  const size = heat.from.length;
  const values = new Float32Array(width).fill(NaN);
  const columns = new Int32Array(width).fill(-1);
  const bad = new Int32Array(width).fill(-1);
  const least = heat.pool === "min";
  for (let pixel = 0; pixel < width; pixel += 1) {
    if (pixels.first[pixel] < 0) continue;
    let worst = NaN;
    for (let at = pixels.first[pixel]; at <= pixels.last[pixel]; at += 1) {
      const value = heat.values[row * size + at];
      if (isBadInput(heat, row, at)) bad[pixel] = at;
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

// The last step of which there is any value, or null.
export function lastMeasured(heat) {
  const size = heat?.until.length ?? 0;
  for (let column = size - 1; column >= 0; column -= 1) {
    const some = heat.layers.some((_, row) => !Number.isNaN(heat.values[row * size + column]));
    if (some) return heat.until[column];
  }
  return null;
}

// A layer used twice has rows "path" and "path#1"; both belong to the layer `path`.
export function pathOfCall(call, paths) {
  return paths.has(call) ? call : call.replace(/#\d+$/, "");
}

export function rowOfLayer(layers, layer) {
  return layer === null ? -1 : layers.indexOf(layer);
}
