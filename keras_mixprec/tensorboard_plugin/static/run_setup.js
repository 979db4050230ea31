import { eventTitle, momentOf } from "./event_text.js";
import { formatNumber, formatScale, momentInWords, words } from "./format.js";

const SETTINGS = [
  "policy", "optimizer", "learning_rate", "loss_scale", "first_loss_scale", "matmul_precision", "device",
];

const lastBegin = ({ events }) => events.findLast(({ kind }) => kind === "train_begin");

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
    return `${words(name)} ${pair.join(" | ")}`;
  });
  const known = both.includes("optimizer") ? "" : " Optimizer and learning rate are not in both logs.";
  return (found.length ? `Set otherwise: ${found.join("; ")}.` : "What the logs have was set alike.") + known;
}

/**
 * What was found of a run as a whole, of which no layer has a row; empty if nothing was.
 * @param {any} run
 */
export function wholeFindings({ events }) {
  const found = events.filter(({ kind, layer }) => kind === "verdict" && !layer);
  return found.map((event) => `${eventTitle(event)} ${momentInWords(momentOf(event))}`).join(", ");
}

/**
 * The folder for a run in float32 beside one in 16 bits: of the log that is shown if the run says
 * where that is, else of `logs`.
 * @param {any} run
 */
export function folderBeside(run) {
  // Its last folder is the monitor's own, in what `log_dir` was.
  const folders = run.run.split("/").slice(0, -1);
  const logged = lastBegin(run)?.settings?.log_dir?.replaceAll("\\", "/").split("/") ?? [];
  const isWithin = folders.every((folder, place) => folder === logged.at(place - folders.length));
  const root = logged.length && isWithin ? logged.slice(0, logged.length - folders.length) : ["logs"];
  return [...root, ...folders.slice(0, -1), "float32"].join("/");
}
