/**
 * What made the cells of a heatmap that are not the doing of their own layer, in words.
 * @typedef {{long: string, short: string}} Origin
 */

/**
 * What Python found to have made cells: another layer, or the run as a whole.
 * @param {any} heat
 * @returns {(call: number, column: number) => Origin | null}
 */
export function originsIn(heat) {
  const known = new Map();
  for (const { long, short, rows, columns } of heat.passed ?? []) {
    const isPassed = new Uint8Array(heat.from.length);
    for (const [first, last] of columns) isPassed.fill(1, first, last + 1);
    for (const row of rows) known.set(row, [...known.get(row) ?? [], { from: { long, short }, isPassed }]);
  }
  return (call, column) => known.get(call)?.find(({ isPassed }) => isPassed[column])?.from ?? null;
}

export const ANY_PASSED = "infinite, NaN or all zero through no fault of the layer";
