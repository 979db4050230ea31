import { formatInteger } from "./format.js";

/**
 * How many calls of `fit` a log has, and the first step of the last one: steps count on over
 * all of them.
 * @param {any} run
 */
export function fitsOf(run) {
  const begins = run.events.filter(({ kind }) => kind === "train_begin");
  return { count: begins.length, first: (begins.at(-1)?.step ?? 0) + 1 };
}

/** How many steps the last `fit` took. */
export function stepsOfFit(run) {
  return run.last_step - fitsOf(run).first + 1;
}

/**
 * What figures of the last `fit` alone are of, `null` if there is no other.
 * @param {any} run
 * @returns {string | null}
 */
export function lastFit(run) {
  const { count, first } = fitsOf(run);
  if (count < 2) return null;
  const [from, until] = [first, run.last_step].map(formatInteger);
  return `fit ${count} of ${count}, steps ${from} to ${until}`;
}
