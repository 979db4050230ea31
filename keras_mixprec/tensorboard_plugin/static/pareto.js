import { toNumber } from "./format.js";

/**
 * The trials of a search as points; those that were not evaluated have no error.
 * @param {any} found What the log has of the search, or nothing.
 * @returns {{share: number, error: number, optimal: boolean, float32: string[]}[]}
 */
export function trialsOf(found) {
  const points = Array.isArray(found?.points) ? found.points : [];
  return points.map((point) => ({
    share: toNumber(point.share_in_16_bits), error: toNumber(point.error ?? null),
    optimal: point.pareto_optimal === true, float32: point.float32 ?? [],
  }));
}

// The decades that the errors span; those of 0 are shown at the lowest.
export function decadesOf(trials) {
  const logs = trials.map(({ error }) => error)
    .filter((error) => error > 0 && error < Infinity).map(Math.log10);
  if (!logs.length) return [-6, 0];
  const low = Math.floor(Math.min(...logs));
  return [low, Math.max(low + 1, Math.ceil(Math.max(...logs)))];
}
