// The part of a layer that a metric is of, or null where nothing is passed on.
function partOf(metric) {
  if (metric?.startsWith("activation_")) return "activation";
  return /^(weight_)?gradient_/.test(metric ?? "") ? "gradient" : null;
}

const isNonfinite = (metric, value) => {
  return metric.endsWith("_nonfinite") ? value > 0 : value === -Infinity;
};

/**
 * From which layer a call has what is not finite in a column, if not from itself: the one
 * with a verdict that comes before it, if that was not finite then.
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
  const is = (row, column) => isNonfinite(heat.metric, heat.values[row * size + column]);
  return (call, column) => {
    const origin = own[call];
    if (origin === null || column < 0 || !is(call, column)) return null;
    return rows.get(origin).some((row) => is(row, column)) ? origin : null;
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

export const passedInWords = (path) => `passes on what ${path} made infinite or NaN`;

export const ANY_PASSED = "passes on what another layer made infinite or NaN";
