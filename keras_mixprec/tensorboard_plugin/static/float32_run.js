import { compareWith, showBeside } from "./actions.js";
import { isFloat32 } from "./comparison.js";
import { copyButton } from "./copy.js";
import { breakable, element } from "./dom.js";
import { float32Code, lackAdvice, monitorArguments, shownFolder, wasReadTooLittle } from "./float32_code.js";
import { momentInWords } from "./format.js";
import { shortRun } from "./names.js";
import { changedAt, hasNo16Bits } from "./precision.js";
import { lacksInWords, speedRatio } from "./speed.js";
import { partnerOf } from "./worth.js";

const NO_FLOAT32 = "Was it worth it? This run alone does not say: there is none in float32 to compare it with.";
const NEITHER = "Were 16 bits worth it? These two runs do not say: neither was compiled with float32.";
const MAKE = "A run in float32 is made by the same script with these two lines before compile, this monitor in " +
  "callbacks, and no tuner.";
// Where the run does not say where its log is.
const SHOWN = " “logs” is the folder that is shown here.";

/**
 * What a run is to be compared with: one in 16 bits with one of the folder in float32 with as many
 * layers, `""` if there is none, and one in float32 with one in 16 bits. `null` if nothing is to be
 * said: it is compared, there is none in 16 bits, or not all runs are read yet.
 * @returns {string | null}
 */
export function missingFloat32({ runs, runData, compareData, summaries }) {
  if (!runData?.layers.length) return null;
  const isWide = isFloat32(runData);
  if (compareData && isFloat32(compareData) !== isWide) return null;
  const rows = summaries ?? [];
  const found = partnerOf(rows, runData, !isWide);
  if (found) return found.run;
  if (isWide) return null;
  const isRead = runs?.length < 2 || (summaries && !rows.some(({ unread }) => unread));
  return isRead ? "" : null;
}

/**
 * What is said of a run that computes nothing in 16 bits, though it was not compiled with float32;
 * empty of any other.
 * @param {any} run
 */
export function nothingIn16Bits(run) {
  if (isFloat32(run) || !hasNo16Bits(run)) return "";
  const changed = Math.max(...run.layers.map(changedAt));
  const since = changed > 0 ? ` ${momentInWords(changed, "after")}` : "";
  return `This run computed nothing in 16 bits${since}: what they would bring it does not show.`;
}

/**
 * Where a run to compare with is found, and whether that will tell how fast 16 bits are.
 * @param {any} run
 * @param {any} row Of that other run, in the table of runs.
 */
export function partnerInWords(run, row) {
  const speed = speedRatio(run, row);
  const again = [run, row].some(wasReadTooLittle) ?
    ` Train what has too few again, with MixPrecMonitor(..., ${monitorArguments(run, true)}).` : "";
  const lacks = speed && !speed.enough ?
    ` Their speeds cannot be compared: ${lacksInWords(speed.lacks, ["this run", shortRun(row.run, run.run)])}.${again}` :
    "";
  return (isFloat32(run) ? `What 16 bits bring is seen beside ${row.run}, which computes in them.` :
    `Was it worth it? This is seen beside ${row.run}, which was compiled with float32.`) + lacks;
}

export function createFloat32Help(store) {
  const root = element("div", { class: "float32-help", hidden: true });

  // The run in 16 bits is the one that is asked about, whichever is shown.
  function compareButton(found) {
    const { runData } = store.state;
    const isWide = isFloat32(runData);
    return element("button", {
      type: "button", class: "quiet",
      onclick: () => isWide ? showBeside(store, found, runData.run) : compareWith(store, found),
    }, isWide ? `Show ${found}, compared with this run` : "Compare");
  }

  store.on(["runs", "runData", "compareData", "summaries"], (state) => {
    const run = missingFloat32(state);
    root.hidden = run === null;
    if (run === null) return root.replaceChildren();
    const { runData, compareData, summaries } = state;
    const none = nothingIn16Bits(runData);
    if (none) return root.replaceChildren(element("p", { class: "hint" }, none));
    const code = run ? null : float32Code(runData);
    const text = run ? partnerInWords(runData, summaries.find((row) => row.run === run)) :
      (compareData ? NEITHER : NO_FLOAT32 + lackAdvice(runData)) + ` ${MAKE}${shownFolder(runData) ? "" : SHOWN}`;
    root.replaceChildren(
      element("p", { class: "hint" }, ...breakable(text)),
      ...code ? [element("pre", {}, element("code", {}, code)), copyButton("Copy code", () => code)] :
        [compareButton(run)],
    );
  });
  return root;
}
