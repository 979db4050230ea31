import { formatInteger } from "./format.js";
import { niceTicks } from "./scales.js";

/** The ticks of an axis of steps: where each is, and its label. */
export function stepTicks(scale, domain, count) {
  const [from, until] = domain;
  return niceTicks(Math.max(0, from), until, count).map((step) => [scale(step), formatInteger(step)]);
}

/** The last step of the runs that are shown. */
export function lastStepOf({ runData, compareData }) {
  return Math.max(runData?.last_step ?? 0, compareData?.last_step ?? 0);
}
