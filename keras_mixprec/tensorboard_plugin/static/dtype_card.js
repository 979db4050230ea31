import { chooseStep } from "./actions.js";
import { dataTable } from "./data_table.js";
import { card, element } from "./dom.js";
import { dtypeBars } from "./dtype_bars.js";
import { formatInteger, readable } from "./format.js";
import { seenFirst } from "./frames.js";
import { shortType } from "./layer_cells.js";
import { shortNames } from "./names.js";

const NO_CHANGE = "No layer has changed its dtype in this run.";
const NO_TUNER = " PrecisionTuner changes them where a layer is unstable: " +
  "fit(..., callbacks=[monitor, PrecisionTuner()]).";

function barInWords({ from, until, dtype, reason }) {
  const steps = from === until ? `${dtype}, before step ${formatInteger(from + 1)}` :
    `${dtype}, steps ${formatInteger(from)} to ${formatInteger(until)}`;
  return reason ? `${steps}: ${readable(reason)}` : steps;
}

export function createDtypes(store) {
  const nothing = element("p", { class: "absent" });
  const rows = element("div", { class: "bars", role: "list" });
  const table = dataTable("History of dtypes");
  const root = card("dtypes", "History of dtypes", [], nothing, rows, table.root);
  root.classList.add("wide");
  let shown = [];

  function fill() {
    const { runData } = store.state;
    if (!runData) return;
    const last = Math.max(1, runData.last_step);
    shown = dtypeBars(runData.layers, runData.events, last);
    const tuned = runData.events.some(({ kind, tuner }) => kind === "train_begin" && tuner);
    nothing.textContent = NO_CHANGE + (tuned ? "" : NO_TUNER);
    nothing.hidden = shown.length > 0;
    rows.hidden = !shown.length;
    const labels = shortNames(shown.map(({ path }) => path), 36);
    rows.replaceChildren(...shown.map(({ path, bars }) => element("div", {
      class: "bar-row", role: "listitem",
    }, element("span", { class: "bar-name", title: path }, labels.get(path)),
    element("div", { class: "track" }, ...bars.map((bar) => barButton(path, bar, last))))),
    element("div", { class: "bar-row", "aria-hidden": "true" }, element("span"),
      element("div", { class: "bar-axis" },
        element("span", {}, "step 0"), element("span", {}, formatInteger(last)))));
    table.fill(shown.length ? rowsOf : null);
  }

  function barButton(path, bar, last) {
    const { from, until, dtype } = bar;
    const node = element("button", {
      type: "button", class: `dtype-bar type ${dtype}`, title: `${path}: ${barInWords(bar)}`,
      "aria-label": `${path}: ${barInWords(bar)}`,
      onclick: () => chooseStep(store, from, path),
    }, shortType(dtype));
    // Of no step, and yet seen: above the one behind it.
    if (from === until) node.classList.add("start");
    node.style.left = `${(100 * from) / last}%`;
    node.style.width = `${(100 * Math.max(until - from, 0)) / last}%`;
    return node;
  }

  /** @returns {[any[], any[][]]} */
  function rowsOf() {
    return [["Layer", ["From step", formatInteger], ["To step", formatInteger], "Dtype", "Because"],
      shown.flatMap(({ path, bars }) => bars.map(({ from, until, dtype, reason }) => {
        return [path, from, until, dtype, readable(reason ?? "")];
      }))];
  }

  store.on(["runData"], seenFirst(root, fill));
  return root;
}
