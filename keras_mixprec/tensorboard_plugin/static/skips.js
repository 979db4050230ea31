import { formatInteger } from "./format.js";
import { countAtMost } from "./scales.js";

/**
 * How many steps were skipped up to a step, in words. Rows are left out at which the loss scale
 * did not change: at its floor none says of a single step that it was skipped.
 * @param {{steps: number[], scale: number[], skipped: number[]}} line
 * @param {number} step
 */
export function skippedInWords({ steps, scale, skipped }, step) {
  const place = Math.max(0, countAtMost(steps, step) - 1);
  const count = skipped[place];
  const past = step - steps[place];
  const more = (skipped[place + 1] ?? count) - count;
  // A step that lowers the scale has a row of its own.
  const isLater = more === 1 && scale[place + 1] < scale[place];
  if (past <= 0 || more === 0 || isLater) return `${formatInteger(count)} skipped so far`;
  const isEach = more === steps[place + 1] - steps[place];
  if (isEach) return `${formatInteger(count + past)} skipped so far`;
  const [at, next] = [steps[place], steps[place + 1]].map(formatInteger);
  return `${formatInteger(count)} skipped up to step ${at}, ` +
    `${formatInteger(count + more)} up to step ${next}`;
}
