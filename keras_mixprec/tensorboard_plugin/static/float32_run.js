import { isFloat32 } from "./comparison.js";
import { copyButton } from "./copy.js";
import { breakable, element } from "./dom.js";
import { folderBeside } from "./run_setup.js";
import { partnerOf } from "./worth.js";

const NO_FLOAT32 = "Was it worth it? This run alone does not say: there is none in float32 to compare it with.";
const NEITHER = "Were 16 bits worth it? These two runs do not say: neither was compiled with float32.";
const MAKE = "One is made by the same script with these two lines before compile, this monitor in " +
  "callbacks, and no tuner.";
// Where the run does not say which that is.
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

/** The two lines that make such a run, beside this one. */
export function float32Code(run) {
  return 'keras_mixprec.apply_policy(model, "float32")\n' +
    `monitor = keras_mixprec.MixPrecMonitor(${JSON.stringify(folderBeside(run))})`;
}

export function createFloat32Help(store) {
  const root = element("div", { class: "float32-help", hidden: true });

  // The run in 16 bits is the one that is asked about, whichever is shown.
  function compareButton(found) {
    const { runData, missing } = store.state;
    const chosen = isFloat32(runData) ? { run: found, compare: runData.run } : { compare: found };
    return element("button", {
      type: "button", class: "quiet",
      onclick: () => store.set({ ...chosen, missing: { ...missing, compare: null } }),
    }, "Compare");
  }

  store.on(["runs", "runData", "compareData", "summaries"], (state) => {
    const run = missingFloat32(state);
    root.hidden = run === null;
    if (run === null) return root.replaceChildren();
    const code = run ? null : float32Code(state.runData);
    const text = run && isFloat32(state.runData) ? `What 16 bits bring is seen beside ${run}, which computes in them.` :
      run ? `Was it worth it? This is seen beside ${run}, which was compiled with float32.` :
      `${state.compareData ? NEITHER : NO_FLOAT32} ${MAKE}${code.includes('"logs/') ? SHOWN : ""}`;
    root.replaceChildren(
      element("p", { class: "hint" }, ...breakable(text)),
      ...code ? [element("pre", {}, element("code", {}, code)), copyButton("Copy code", () => code)] :
        [compareButton(run)],
    );
  });
  return root;
}
