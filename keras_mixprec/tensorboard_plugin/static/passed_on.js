/**
 * What made it infinite, NaN or all zero: a layer with a verdict, or the run as a whole.
 * @typedef {{layer?: string, because?: string}} Origin
 */

/**
 * What made the cells of a heatmap that are not the doing of their own layer, which Python finds.
 * @param {any} heat
 * @returns {(call: number, column: number) => Origin | null}
 */
export function originsIn(heat) {
  const known = new Map();
  for (const { from, rows, columns } of heat.passed ?? []) {
    const isPassed = new Uint8Array(heat.from.length);
    for (const [first, last] of columns) isPassed.fill(1, first, last + 1);
    for (const row of rows) known.set(row, [...known.get(row) ?? [], { from, isPassed }]);
  }
  return (call, column) => known.get(call)?.find(({ isPassed }) => isPassed[column])?.from ?? null;
}

/**
 * What made the worst activations of a layer not finite or all zero, if not the layer itself.
 * @param {any} layer A row of the table of layers.
 * @returns {Origin | null}
 */
export function originOf({ passed_from: layer, lost_because: because }) {
  return layer ? { layer } : because ? { because } : null;
}

/**
 * What is not a layer's own doing, in words and shorter.
 * @param {Origin} origin
 * @param {number} value What was measured: all is zero where it is infinite.
 * @param {(path: string) => string} spell How a layer is written.
 */
export function passedInWords({ layer, because }, value, spell = (path) => path) {
  if (because) {
    return { long: `infinite or NaN because ${because}: no fault of the layer`, short: `not finite: ${because}` };
  }
  const from = spell(layer ?? "");
  if (value === Infinity) {
    return { long: `all zero: comes from ${from}, which has a verdict`, short: `all zero: comes from ${from}` };
  }
  const short = `passes on what ${from} made`;
  return { long: `${short} infinite or NaN`, short };
}

export const ANY_PASSED = "infinite, NaN or all zero through no fault of the layer";
