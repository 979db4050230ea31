import { stepsOfFit } from "./fits.js";
import { lastBegin } from "./run_setup.js";
import { lackOf } from "./speed.js";

// What a monitor does by itself.
const USUAL = { update_freq: 50, probe_every: 100, max_overhead: 0.02 };
// A run that is compared has five readings, some of them of steps that are left out.
const READINGS_TO_HAVE = 10;
const STEPS_TO_HAVE = 100;

/** Whether the monitor has read too little of a run, or of its row, to compare its speed. */
export function wasReadTooLittle(run) {
  return ["steps", "readings"].includes(lackOf(run)?.what ?? "");
}

// Of one that skipped its steps nothing says so yet: it lacks readings as well once it is repaired.
function willBeReadTooLittle(run) {
  const { update_freq: every } = { ...USUAL, ...lastBegin(run)?.settings };
  return lackOf(run)?.what === "trained" && stepsOfFit(run) < READINGS_TO_HAVE * every;
}

/**
 * What a monitor is to be given for a run that can be compared, beyond what it does by itself:
 * what this run's was given, or where that left too little, what leaves more.
 * @param {any} run
 * @param {boolean} [isLittle] Whether that left too little.
 * @returns {string} Arguments, as code; empty if there are none.
 */
export function monitorArguments(run, isLittle = wasReadTooLittle(run) || willBeReadTooLittle(run)) {
  const given = { ...USUAL, ...lastBegin(run)?.settings };
  const steps = Math.max(stepsOfFit(run), STEPS_TO_HAVE);
  const wanted = isLittle ? {
    update_freq: Math.min(given.update_freq, Math.floor(steps / READINGS_TO_HAVE)),
    // Steps that are probed are not timed.
    probe_every: given.probe_every && Math.max(given.probe_every, USUAL.probe_every),
    // Readings are left out where they take too much of the time, as of short steps.
    max_overhead: 1,
  } : given;
  const named = Object.keys(USUAL).filter((name) => wanted[name] !== USUAL[name]);
  return named.map((name) => `${name}=${wanted[name]}`).join(", ");
}

/**
 * What is to be done before a run can be compared with any other, in words; empty if nothing.
 * @param {any} run
 */
export function lackAdvice(run) {
  const lack = lackOf(run);
  if (!lack) return "";
  const given = `MixPrecMonitor(..., ${monitorArguments(run)})`;
  const again = lack.what === "trained" ? "Repair it first, as said on top." :
    stepsOfFit(run) < STEPS_TO_HAVE ?
      `Train it again first, for ${STEPS_TO_HAVE} steps at least and with ${given}.` :
      `Train it again first, with ${given}.`;
  return ` Its speed could not be compared with that of any other, since it has ${lack.text}. ${again}`;
}

/** The two lines that make a run in float32, beside this one. */
export function float32Code(run) {
  const given = [JSON.stringify(folderBeside(run)), monitorArguments(run)].filter(Boolean);
  return 'keras_mixprec.apply_policy(model, "float32")\n' +
    `monitor = keras_mixprec.MixPrecMonitor(${given.join(", ")})`;
}

/**
 * The folders that lead to the log that is shown, `null` if the run does not say where that is.
 * @param {any} run
 * @returns {string[] | null}
 */
export function shownFolder(run) {
  // Its last folder is the monitor's own, in what `log_dir` was.
  const folders = run.run.split("/").slice(0, -1);
  const logged = lastBegin(run)?.settings?.log_dir?.replaceAll("\\", "/").split("/") ?? [];
  const isWithin = folders.every((folder, place) => folder === logged.at(place - folders.length));
  return logged.length && isWithin ? logged.slice(0, logged.length - folders.length) : null;
}

function folderBeside(run) {
  const folders = run.run.split("/").slice(0, -2);
  return [...shownFolder(run) ?? ["logs"], ...folders, "float32"].join("/");
}
