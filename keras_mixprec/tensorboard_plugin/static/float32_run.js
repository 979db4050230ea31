import { isFloat32 } from "./comparison.js";
import { copyButton } from "./copy.js";
import { breakable, element } from "./dom.js";

const NO_FLOAT32 = "Was it worth it? This run alone does not say: there is none in float32 to compare it with.";
const NEITHER = "Were 16 bits worth it? These two runs do not say: neither was compiled with float32.";
const MAKE = "One is made by the same script with these two lines before compile, this monitor in " +
  "callbacks, and no tuner. “logs” is the folder that is shown here.";

/**
 * What a run in 16 bits is to be compared with: a run of the folder in float32 with as many
 * layers, `""` if there is none, `null` if nothing is to be said: it is compared, computes in
 * float32 itself, or not all runs are read yet.
 * @returns {string | null}
 */
export function missingFloat32({ runs, runData, compareData, summaries }) {
  if (!runData?.layers.length || isFloat32(runData)) return null;
  if (compareData && isFloat32(compareData)) return null;
  const rows = summaries ?? [];
  const found = rows.find(({ run, layers, policy }) => {
    return run !== runData.run && policy === "float32" && layers === runData.layers.length;
  });
  if (found) return found.run;
  const isRead = runs?.length < 2 || (summaries && !rows.some(({ unread }) => unread));
  return isRead ? "" : null;
}

/** The two lines that make such a run, beside the one that is named. */
export function float32Code(run) {
  // Its last folder is the monitor's own, in what `log_dir` was.
  const folders = run.split("/").slice(0, -2);
  const folder = ["logs", ...folders, "float32"].join("/");
  return 'keras_mixprec.apply_policy(model, "float32")\n' +
    `monitor = keras_mixprec.MixPrecMonitor(${JSON.stringify(folder)})`;
}

export function createFloat32Help(store) {
  const root = element("div", { class: "float32-help", hidden: true });

  function compareButton(run) {
    return element("button", {
      type: "button", class: "quiet", onclick: () => store.set({
        compare: run, missing: { ...store.state.missing, compare: null },
      }),
    }, "Compare");
  }

  store.on(["runs", "runData", "compareData", "summaries"], (state) => {
    const run = missingFloat32(state);
    root.hidden = run === null;
    if (run === null) return root.replaceChildren();
    const code = run ? null : float32Code(state.runData.run);
    const text = run ? `Was it worth it? This is seen beside ${run}, which was compiled with float32.` :
      `${state.compareData ? NEITHER : NO_FLOAT32} ${MAKE}`;
    root.replaceChildren(
      element("p", { class: "hint" }, ...breakable(text)),
      ...code ? [element("pre", {}, element("code", {}, code)), copyButton("Copy code", () => code)] :
        [compareButton(run)],
    );
  });
  return root;
}
