import { momentInWords } from "./format.js";
import { isLeftOut, originAt } from "./heat_data.js";
import { GRAVEST } from "./heat_rows.js";
import { BAD_INPUT, valueInWords } from "./metrics.js";
import { alarmLevel, levelColor, valueColor } from "./palette.js";
import { changedAt, widerAt } from "./precision.js";

const parentOf = (path) => (path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : null);

// Returns the nearest outer layer of a path that is in the table, or null.
function holderOf(path, paths) {
  for (let above = parentOf(path); above !== null; above = parentOf(above)) {
    if (paths.has(above)) return above;
  }
  return null;
}

/**
 * Returns the layers that contain other layers.
 * @param {any[]} layers The table of layers.
 * @returns {Set<string>}
 */
export function holdersIn(layers) {
  const paths = new Set(layers.map(({ path }) => path));
  const holders = [...paths].map((path) => holderOf(path, paths));
  return new Set(holders.filter((path) => path !== null));
}

/**
 * Returns the graph of a model with some of its blocks folded.
 * @param {any[]} layers The table of layers. Each row may name the layers that feed it.
 * @param {Set<string>} open The blocks whose layers are shown.
 * @returns {{nodes: {path: string, inside: string[], depth: number, column: number}[],
 *   edges: {from: string, to: string, nested: boolean}[], nestedOnly: boolean}}
 */
export function foldedGraph(layers, open) {
  const paths = new Set(layers.map(({ path }) => path));
  const holders = new Map(layers.map(({ path }) => [path, holderOf(path, paths)]));
  const shownAs = new Map();
  // Add each block before its layers.
  for (const { path } of layers) {
    const holder = holders.get(path);
    const hidden = holder !== null && !(shownAs.get(holder) === holder && open.has(holder));
    shownAs.set(path, hidden ? shownAs.get(holder) : path);
  }
  const inside = new Map();
  for (const { path } of layers) {
    if (!inside.has(shownAs.get(path))) inside.set(shownAs.get(path), []);
    inside.get(shownAs.get(path)).push(path);
  }
  const edges = new Map();
  const add = (from, to, nested) => {
    if (from !== undefined && from !== to) edges.set(`${from}\n${to}`, { from, to, nested });
  };
  for (const { path, fed_by: feeders } of layers) {
    for (const feeder of feeders ?? []) add(shownAs.get(feeder), shownAs.get(path), false);
    const holder = holders.get(path);
    if (holder !== null && !feeders?.length) add(shownAs.get(holder), shownAs.get(path), true);
  }
  const kept = [...edges.values()];
  return {
    nodes: placed([...inside.keys()], kept, inside), edges: kept,
    nestedOnly: layers.every(({ fed_by: feeders }) => feeders === undefined),
  };
}

// Places nodes. The depth of a node is the length of the longest path to it, and nodes of the
// same depth are side by side.
function placed(names, edges, inside) {
  const after = new Map(names.map((name) => [name, []]));
  const waiting = new Map(names.map((name) => [name, 0]));
  for (const { from, to } of edges) {
    after.get(from).push(to);
    waiting.set(to, waiting.get(to) + 1);
  }
  const depths = new Map(names.map((name) => [name, 0]));
  const ready = names.filter((name) => !waiting.get(name));
  const left = new Set(names);
  while (left.size) {
    // A layer that is used twice can be part of a cycle. In a cycle, take any node that is left.
    const name = ready.shift() ?? left.values().next().value;
    if (!left.delete(name)) continue;
    for (const next of after.get(name).filter((one) => left.has(one))) {
      depths.set(next, Math.max(depths.get(next), depths.get(name) + 1));
      waiting.set(next, waiting.get(next) - 1);
      if (!waiting.get(next)) ready.push(next);
    }
  }
  const taken = new Map();
  return names.map((path) => {
    const depth = depths.get(path);
    const column = taken.get(depth) ?? 0;
    taken.set(depth, column + 1);
    return { path, inside: inside.get(path), depth, column };
  });
}

/**
 * Returns the worst reading of each layer, over all its calls. Readings before the last change
 * of dtypes count only if there is no reading after that change.
 * @param {any} heat
 * @param {Map<string, any>} layers The table of layers, by path.
 * @param {(call: string, paths: any) => string} pathOf
 * @param {string} kind The kind of the metric. Errors depend only on the layer itself. Other
 *   metrics depend on all layers before it.
 * @returns {Map<string, {path: string, value: number, step: number | null,
 *   isBefore: boolean, isBad: boolean, column: number, origin: import("./heat_data.js").Origin | null}>}
 */
export function worstByLayer(heat, layers, pathOf, kind) {
  const found = new Map();
  const last = Math.max(-1, ...[...layers.values()].map(changedAt));
  heat.layers.forEach((call, row) => {
    const path = pathOf(call, layers);
    const since = kind === "error" ? changedAt(layers.get(path)) : last;
    const worst = worstOfRow(heat, row, since);
    const reading = { path, ...worst, origin: originAt(heat, row, worst.column) };
    found.set(path, worseOf(found.get(path) ?? reading, reading, heat.pool));
  });
  return found;
}

function worstOfRow(heat, row, since) {
  const size = heat.from.length;
  let [value, step, isBefore, at] = [NaN, null, true, -1];
  for (let column = 0; column < size; column += 1) {
    const one = heat.values[row * size + column];
    const before = heat.from[column] <= since;
    if (Number.isNaN(one) || (before && !isBefore)) continue;
    const worse = heat.pool === "min" ? one < value : one > value;
    if (step !== null && before === isBefore && !worse) continue;
    [value, step, isBefore, at] = [one, heat.until[column], before, column];
  }
  const isBad = isLeftOut(heat, row);
  return { value, step, isBefore: isBefore && step !== null, isBad, column: at };
}

// Returns the worse of two readings. Readings before a change of dtypes count less than later ones.
function worseOf(one, other, pool) {
  if (Number.isNaN(one.value)) return other;
  if (Number.isNaN(other.value)) return one;
  if (one.isBefore !== other.isBefore) return one.isBefore ? other : one;
  return (pool === "min" ? other.value < one.value : other.value > one.value) ? other : one;
}

// Returns words for the change of dtype that came after a reading.
function beforeInWords(layer, step) {
  return step <= changedAt(layer) ? `before it was in ${layer.compute_dtype}` :
    "before dtypes last changed";
}

/**
 * Returns a reading in words, with its color and its level.
 * @param {any} reading
 * @param {any} layer The row of the table of layers.
 * @param {{name: string, kind: string}} metric
 * @param {any} format The format that headroom refers to.
 * @param {boolean} asIf True if no layer ever computed in that format.
 * @returns {{words: string, short?: string, level: string, color: number[] | null}} `short`
 *   is for places with room for a few words only.
 */
export function describeReading({ value, step, isBefore, isBad, origin }, layer, { name, kind }, format, asIf) {
  const inside = name === "activation_headroom_bits" && layer ? layer.inside : null;
  if (inside && value !== -Infinity) {
    const level = inside.is_open ? "bad" : "beyond";
    return { words: inside.long, short: inside.short, level, color: levelColor(level) };
  }
  if (Number.isNaN(value) && isBad) {
    return { words: BAD_INPUT, level: "input", color: levelColor("input") };
  }
  if (origin && !isBefore) {
    return { words: origin.long, short: origin.short, level: "passed", color: levelColor("passed") };
  }
  const wider = step === null ? null : widerAt(layer, step, format.name);
  const words = valueInWords(kind, value, wider, format.name);
  if (isBefore) {
    const before = beforeInWords(layer, step);
    return {
      words: `${words} ${momentInWords(step, "after")}, ${before}`, level: "beyond",
      short: `${before.replace("it was in ", "")}: ${words}`, color: levelColor("beyond"),
    };
  }
  const isWide = Boolean(wider) && !(asIf && value > 0);
  return {
    // The short text leaves out the headroom in a different format, which the tooltip has.
    words, short: wider && kind === "headroom" ? words.split(", ")[0] : words,
    level: alarmLevel(kind, value, isWide), color: valueColor(kind, value, isWide),
  };
}

/**
 * Returns the most severe of several states, or the worst value among equal levels.
 * @param {any[]} states Results of `describeReading`, each with its reading.
 * @param {string | undefined} pool
 */
export function gravestOf(states, pool) {
  const rank = ({ level }) => GRAVEST.indexOf(level);
  return states.reduce((one, other) => {
    if (rank(one) !== rank(other)) return rank(one) < rank(other) ? one : other;
    return worseOf(one.reading, other.reading, pool) === other.reading ? other : one;
  });
}
