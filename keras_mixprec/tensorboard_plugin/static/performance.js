import { compareWith } from "./actions.js";
import { copyButton } from "./copy.js";
import { breakable, card, element } from "./dom.js";
import { formatNumber } from "./format.js";
import { labelOfRun, shortRun } from "./names.js";

export function createPerformance(store) {
  const help = element("div", { class: "float32-help", hidden: true });
  const about = element("p", { class: "hint about-speed", hidden: true });
  const rows = element("tbody");
  const head = element("thead");
  const all = element("div", {}, about, element("table", {}, head, rows));
  const root = card("performance", "Speed", [], help, all);

  const runsOf = ({ runData, compareData }) => {
    return [runData, compareData].filter((data) => data?.performance);
  };

  const figureOf = ({ performance }, name) => performance.figures.find((figure) => figure.name === name);

  function fill() {
    const { runData, compareData } = store.state;
    const known = runsOf(store.state);
    // Not of a log that is no training.
    root.hidden = !known.length && !runData?.speed_notes.length;
    const notes = [runData, compareData].filter(Boolean).flatMap((data) => {
      const name = compareData ? `${shortRun(data.run, (data === runData ? compareData : runData).run)}: ` : "";
      return data.speed_notes.map((text) => name + text);
    });
    about.replaceChildren(...breakable(notes.join(" ")));
    about.hidden = !notes.length;
    head.parentElement.hidden = !known.length;
    if (!known.length) return;
    head.replaceChildren(...compareData ? [headOf(known, runData)] : []);
    const shown = known[0].performance.figures.filter(({ name }) => {
      return known.some((data) => figureOf(data, name)?.value !== null);
    });
    rows.replaceChildren(
      rowOf("policy", "compiled with", "the policy of its layers when the run began", known.map(({ policy }) => policy)),
      // How fast a run is says nothing without what it came to.
      rowOf("last_loss", "last loss", "the last loss that was logged", known.map(({ loss }) => {
        return loss ? formatNumber(loss.values.at(-1)) : "–";
      })),
      ...shown.map(({ name, title, explanation }) => {
        return rowOf(name, title, explanation, known.map((data) => figureOf(data, name)?.text ?? "–"));
      }));
  }

  function rowOf(name, label, title, texts) {
    return element("tr", { "data-figure": name, title }, element("th", { scope: "row" }, label),
      ...texts.map((text) => element("td", { class: "number" }, text)));
  }

  // Where the folder has what this run is to be compared with, or how to make it.
  function offer() {
    const { runs, runData, compareData, summaries } = store.state;
    const partner = summaries?.find(({ run }) => run === runData?.run)?.partner;
    const isRead = runs?.length < 2 || (summaries && !summaries.some(({ unread }) => unread));
    const make = !partner && isRead ? runData?.float32_run : null;
    help.hidden = Boolean(compareData) || (!partner && !make);
    help.replaceChildren(...partner ? [element("button", {
      type: "button", class: "quiet", onclick: () => compareWith(store, partner),
    }, `Compare with ${partner}`)] : make ? [
      element("p", { class: "hint" }, ...breakable(make.text)),
      element("pre", {}, element("code", {}, make.code)), copyButton("Copy code", () => make.code),
    ] : []);
  }

  function headOf(known, runData) {
    const names = known.map((data) => {
      const other = known.find((one) => one !== data);
      const compared = data !== runData;
      return element("th", {
        class: compared ? "of-run compared" : "of-run", scope: "col", title: data.run,
      }, labelOfRun(data.run, other?.run));
    });
    return element("tr", {}, element("td"), ...names);
  }

  store.on(["runData", "compareData"], fill);
  store.on(["runs", "runData", "compareData", "summaries"], offer);
  return root;
}
