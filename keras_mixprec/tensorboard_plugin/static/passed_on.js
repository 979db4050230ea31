// The part of a layer that a metric is of, or null where nothing is passed on.
function partOf(metric) {
  if (metric?.startsWith("activation_")) return "activation";
  return /^(weight_)?gradient_/.test(metric ?? "") ? "gradient" : null;
}

// Infinities and NaNs are passed on, and so are outputs that are all zero. Gradients that are
// zero may have vanished on their own.
function isPassed(metric, value) {
  if (metric.endsWith("_nonfinite")) return value > 0;
  return value === -Infinity || (value === Infinity && metric.startsWith("activation_"));
}

/**
 * From which layer a call has what is not finite or all zero in a column, if not from itself:
 * the one with a verdict that comes before it, if that was the same then.
 * @param {any} heat
 * @param {Map<string, any>} layers The table of layers, by path.
 * @param {(call: string, paths: any) => string} pathOf
 * @returns {(call: number, column: number) => string | null}
 */
export function originsIn(heat, layers, pathOf) {
  const part = partOf(heat.metric);
  const size = heat.from.length;
  const own = heat.layers.map((call) => layers.get(pathOf(call, layers))?.passes_on?.[part] ?? null);
  const wanted = new Set(own);
  const rows = new Map([...wanted].map((path) => [path, []]));
  heat.layers.forEach((call, row) => rows.get(pathOf(call, layers))?.push(row));
  const valueAt = (row, column) => heat.values[row * size + column];
  return (call, column) => {
    const origin = own[call];
    const value = valueAt(call, column);
    if (origin === null || column < 0 || !isPassed(heat.metric, value)) return null;
    return rows.get(origin).some((row) => {
      const before = valueAt(row, column);
      return isPassed(heat.metric, before) && value > 0 === before > 0;
    }) ? origin : null;
  };
}

/** Whether any layer passes on what another made. */
export function hasPassed(heat, layers, pathOf) {
  const originAt = originsIn(heat, layers, pathOf);
  return heat.layers.some((call, row) => {
    if (!layers.get(pathOf(call, layers))?.passes_on?.[partOf(heat.metric)]) return false;
    return heat.from.some((_, column) => originAt(row, column) !== null);
  });
}

/**
 * What a layer has from another one, in words and shorter.
 * @param {string} path The layer with the verdict.
 * @param {number} value What was measured: all is zero where it is infinite.
 */
export function passedInWords(path, value) {
  if (value === Infinity) {
    return { long: `all zero: comes from ${path}, which has a verdict`, short: `all zero: comes from ${path}` };
  }
  const short = `passes on what ${path} made`;
  return { long: `${short} infinite or NaN`, short };
}

export const ANY_PASSED = "infinite, NaN or all zero because of another layer";
