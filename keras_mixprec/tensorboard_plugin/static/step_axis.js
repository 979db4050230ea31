import { formatInteger } from "./format.js";
import { niceTicks } from "./scales.js";

/** Returns the ticks of a step axis, as pairs of a position and a label. */
export function stepTicks(scale, domain, count) {
  const [from, until] = domain;
  return niceTicks(Math.max(0, from), until, count).map((step) => [scale(step), formatInteger(step)]);
}

/** Returns the last step of the shown runs. */
export function lastStepOf({ runData, compareData }) {
  return Math.max(runData?.last_step ?? 0, compareData?.last_step ?? 0);
}
