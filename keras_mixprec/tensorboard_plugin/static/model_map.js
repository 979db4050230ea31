const parentOf = (path) => (path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : null);

// The layer above a path that is in the table, or null.
function holderOf(path, paths) {
  for (let above = parentOf(path); above !== null; above = parentOf(above)) {
    if (paths.has(above)) return above;
  }
  return null;
}

/**
 * The layers that hold others.
 * @param {any[]} layers The table of layers.
 * @returns {Set<string>}
 */
export function holdersIn(layers) {
  const paths = new Set(layers.map(({ path }) => path));
  const holders = [...paths].map((path) => holderOf(path, paths));
  return new Set(holders.filter((path) => path !== null));
}

/**
 * The graph of a model with some of its blocks folded.
 * @param {any[]} layers The table of layers, each with those that feed it, if known.
 * @param {Set<string>} open The blocks whose layers are shown.
 * @returns {{nodes: {path: string, inside: string[], depth: number, column: number}[],
 *   edges: {from: string, to: string, nested: boolean}[], nestedOnly: boolean}}
 */
export function foldedGraph(layers, open) {
  const paths = new Set(layers.map(({ path }) => path));
  const holders = new Map(layers.map(({ path }) => [path, holderOf(path, paths)]));
  const shownAs = new Map();
  // A block comes before the layers in it.
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

// Each as deep as the longest way to it; side by side what is as deep.
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
    // A layer that is used twice in a row feeds what feeds it.
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

// The worst value of each layer over all steps, of all its calls.
export function worstByLayer(heat, paths, pathOf) {
  const found = new Map();
  const size = heat.from.length;
  heat.layers.forEach((call, row) => {
    const path = pathOf(call, paths);
    let worst = found.get(path) ?? NaN;
    for (let at = row * size; at < (row + 1) * size; at += 1) {
      worst = worseOf(worst, heat.values[at], heat.pool);
    }
    found.set(path, worst);
  });
  return found;
}

export function worseOf(one, other, pool) {
  if (Number.isNaN(one)) return other;
  if (Number.isNaN(other)) return one;
  return pool === "min" ? Math.min(one, other) : Math.max(one, other);
}
