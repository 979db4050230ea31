import { eventTitle, momentOf } from "./event_text.js";
import { formatNumber, formatScale, momentInWords, words } from "./format.js";
import { shortRun } from "./names.js";

const SETTINGS = [
  "policy", "optimizer", "learning_rate", "loss_scale", "first_loss_scale", "matmul_precision", "device",
];
const NAMES = { matmul_precision: "float32 products in" };

export const lastBegin = ({ events }) => events.findLast(({ kind }) => kind === "train_begin");

function settingInWords(name, value) {
  if (name === "first_loss_scale") return formatScale(value);
  return typeof value === "number" ? formatNumber(value) : value ?? "none";
}

// Logs of older versions have little more than the policy.
function setupOf(run) {
  const { settings = {}, tuner } = lastBegin(run) ?? {};
  return { ...settings, policy: run.policy, tuner: tuner ? "PrecisionTuner" : "none" };
}

/**
 * What was set otherwise in one run than in another, in a sentence.
 * @param {any} run
 * @param {any} other
 */
export function setupDifference(run, other) {
  const [own, its] = [run, other].map(setupOf);
  // What one of the logs does not have is not known.
  const both = [...SETTINGS, "tuner"].filter((name) => name in own && name in its);
  const found = both.filter((name) => own[name] !== its[name]).map((name) => {
    const pair = [own, its].map((setup) => settingInWords(name, setup[name]));
    return `${NAMES[name] ?? words(name)} ${pair.join(" | ")}`;
  });
  const known = both.includes("optimizer") ? "" : " Optimizer and learning rate are not in both logs.";
  const names = [shortRun(run.run, other.run), shortRun(other.run, run.run)];
  return (found.length ?
    `Set otherwise in ${names.join(" | ")}, which need not be why their results differ: ${found.join("; ")}.` :
    `In ${names.join(" and ")}, what the logs have was set alike.`) + known;
}

/**
 * What was found of a run as a whole, of which no layer has a row; empty if nothing was.
 * @param {any} run
 */
export function wholeFindings({ events }) {
  const found = events.filter(({ kind, layer }) => kind === "verdict" && !layer);
  return found.map((event) => `${eventTitle(event)} ${momentInWords(momentOf(event))}`).join(", ");
}
