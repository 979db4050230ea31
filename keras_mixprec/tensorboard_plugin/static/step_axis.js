import { formatInteger, formatSeconds, momentInWords } from "./format.js";
import { countAtMost, niceTicks } from "./scales.js";

/** The ticks of an axis of steps: where each is, and its label. */
export function stepTicks(scale, domain, count) {
  const [from, until] = domain;
  return niceTicks(Math.max(0, from), until, count).map((step) => [scale(step), formatInteger(step)]);
}

/** The last step of the runs that are shown. */
export function lastStepOf({ runData, compareData }) {
  return Math.max(runData?.last_step ?? 0, compareData?.last_step ?? 0);
}

/** A step in words, with the time of training until then as far as the log has it. */
export function stepInWords(data, step, at = "") {
  const words = momentInWords(step, at);
  const { steps = [], values } = data?.time ?? {};
  const place = countAtMost(steps, step) - 1;
  if (place < 0) return words;
  const next = Math.min(place + 1, steps.length - 1);
  const share = (Math.min(step, steps[next]) - steps[place]) / (steps[next] - steps[place] || 1);
  return `${words} · ${formatSeconds(values[place] + share * (values[next] - values[place]))} of training`;
}
