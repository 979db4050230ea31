import { momentInWords, toNumber } from "./format.js";
import { outputHeadroom } from "./inside.js";
import { beforeInWords } from "./model_map.js";
import { alarmLevel } from "./palette.js";
import { changedAt, isWider, ownHeadroom } from "./precision.js";

// How many binary digits a number has: what two dtypes differ by.
const DIGITS = { float64: 53, float32: 24, float16: 11, bfloat16: 8 };
// Further than this it does not matter how far two numbers are from each other.
const MOST_BITS = 24;

function numberOr(value) {
  const number = value === undefined ? NaN : toNumber(value);
  return Number.isNaN(number) ? null : number;
}

// 0 if both are equal or one is not known.
function apart(one, other) {
  if (one === null || other === null || one === other) return 0;
  return Math.min(Math.abs(one - other), MOST_BITS);
}

const digitsOf = (layer) => DIGITS[layer?.compute_dtype] ?? null;
const logOf = (error) => (error > 0 ? Math.log2(error) : error === 0 ? -MOST_BITS : null);

/**
 * What each column is of a layer of a run, and by how much two of these differ.
 */
export const DIFFERENCES = [
  {
    id: "dtype", label: "Dtype", of: (layer) => layer?.compute_dtype ?? null,
    apart: (one, other) => apart(digitsOf(one), digitsOf(other)) ||
      Number(one?.compute_dtype !== other?.compute_dtype),
  },
  {
    id: "headroom", label: "Activation headroom", of: (layer, ranges, formatName) => {
      const bits = numberOr(outputHeadroom(layer));
      return bits === null ? null : ownHeadroom(bits, layer.compute_dtype, formatName);
    },
    note: (layer, ranges, formatName) => {
      if (layer?.lost_because) return `: ${layer.lost_because}`;
      const isBeyond = -Infinity < outputHeadroom(layer) && outputHeadroom(layer) <= 0;
      return isBeyond && isWider(layer.compute_dtype, formatName) ? `, beyond ${formatName}` : "";
    },
    // Less than a power of two comes of training once more, and what the whole run lost is of no layer.
    // Of room that nothing is wrong with, more is not better.
    apart: (one, other, ranges, values) => {
      if (one?.lost_because || other?.lost_because) return 0;
      if (values.every((bits) => bits !== null && alarmLevel("headroom", bits) === "quiet")) return 0;
      const bits = apart(...values);
      return bits < 1 ? 0 : bits;
    },
  },
  {
    id: "inside", label: "Overflow inside the layer",
    of: (layer) => numberOr(layer?.inside?.largest),
    apart: (one, other) => Number(Boolean(one?.inside) !== Boolean(other?.inside)),
  },
  {
    id: "verdicts", label: "Verdicts", of: (layer) => layer?.verdicts ?? null,
    apart: (one, other) => apart(one?.severity ?? 0, other?.severity ?? 0) ||
      Number(String(one?.verdicts ?? "") !== String(other?.verdicts ?? "")),
  },
  {
    id: "error", label: "Error against float32",
    of: (layer, ranges) => numberOr(ranges?.error),
    note: (layer, ranges) => {
      const step = ranges?.error_step ?? null;
      if (!layer || step === null) return "";
      // What a repair has changed since is no error of now.
      const before = step <= changedAt(layer) ? `, ${beforeInWords(layer, step)}` : "";
      return ` ${momentInWords(step)}${before}`;
    },
    apart: (one, other, ranges) => apart(
      ...ranges.map((own) => logOf(numberOr(own?.error)))),
  },
  {
    id: "flops", label: "FLOPs", of: (layer) => numberOr(layer?.share_of_flops ?? null),
  },
];

/**
 * Two runs layer by layer, the largest difference first; of all columns, what either run
 * has a verdict on comes before it.
 * @param {any} run
 * @param {any} other
 * @param {any} ranges What was measured of the layers of the first, with errors.
 * @param {any} otherRanges The same of the second.
 * @param {string} by The column to sort by, or `"all"`: then each counts as a share of
 *   the largest difference in it.
 */
export function differencesOf(run, other, ranges, otherRanges, by) {
  const layersOf = (data) => new Map(data.layers.map((layer) => [layer.path, layer]));
  const [mine, others] = [layersOf(run), layersOf(other)];
  const formats = [run, other].map(({ format }) => format?.name);
  const paths = [...new Set([...mine.keys(), ...others.keys()])];
  const rows = paths.map((path) => {
    const pair = [mine.get(path), others.get(path)];
    const measured = [ranges?.layers[path], otherRanges?.layers[path]];
    const cells = DIFFERENCES.map((column) => {
      const values = pair.map((layer, place) => column.of(layer, measured[place], formats[place]));
      const size = column.apart ? column.apart(pair[0], pair[1], measured, values) :
        apart(...values);
      const notes = pair.map((layer, place) => column.note?.(layer, measured[place], formats[place]) ?? "");
      return { id: column.id, values, size, notes };
    });
    return { path, cells };
  });
  const most = DIFFERENCES.map((_, place) => {
    return rows.reduce((largest, { cells }) => Math.max(largest, cells[place].size), 0);
  });
  const sizeOf = ({ cells }) => cells.reduce((sum, { id, size }, place) => {
    if (by !== "all") return id === by ? size : sum;
    return sum + (most[place] ? size / most[place] : 0);
  }, 0);
  // What differs in several columns may add up to more than a verdict.
  const isNamed = ({ path }) => by === "all" && [mine, others].some((layers) => {
    return layers.get(path)?.verdicts.length > 0;
  });
  return rows
    .map((row) => ({ ...row, size: sizeOf(row), differs: row.cells.some(({ size }) => size > 0) }))
    .sort((one, two) => Number(isNamed(two)) - Number(isNamed(one)) || two.size - one.size);
}
