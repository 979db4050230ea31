import { card, element } from "./dom.js";
import { formatNumber, readable } from "./format.js";
import { labelOfRun } from "./names.js";

/** Returns a card with the speed of a run, or of two compared runs. */
export function createPerformance(store) {
  const about = element("p", { class: "hint about-speed" });
  const rows = element("tbody");
  const head = element("thead");
  const root = card("performance", "Speed", [], about, element("table", {}, head, rows));
  const speedOf = (data) => data?.cards.find(({ name }) => name === "speed");
  const figureOf = (data, name) => speedOf(data).figures.find((figure) => figure.name === name);

  function fill() {
    const { runData, compareData } = store.state;
    const known = [runData, compareData].filter(speedOf);
    root.hidden = !known.length;
    if (root.hidden) return;
    const { title, sentence, figures } = speedOf(known[0]);
    about.textContent = compareData ? "" : readable(`${title}: ${sentence}`);
    head.replaceChildren(...compareData ? [headOf(known, runData)] : []);
    rows.replaceChildren(
      rowOf("policy", "compiled with", "the policy of its layers when the run began", known.map(({ policy }) => policy)),
      rowOf("last_loss", "last loss", "the last loss that was logged", known.map(({ loss }) => {
        return loss ? formatNumber(loss.values.at(-1)) : "–";
      })),
      ...figures.map(({ name, title: label, explanation }) => {
        return rowOf(name, label, explanation, known.map((data) => figureOf(data, name)?.text ?? "–"));
      }));
  }

  function rowOf(name, label, title, texts) {
    return element("tr", { "data-figure": name, title }, element("th", { scope: "row" }, label),
      ...texts.map((text) => element("td", { class: "number" }, text)));
  }

  function headOf(known, runData) {
    return element("tr", {}, element("td"), ...known.map((data) => {
      const other = known.find((one) => one !== data);
      const compared = data !== runData;
      return element("th", {
        class: compared ? "of-run compared" : "of-run", scope: "col", title: data.run,
      }, labelOfRun(data.run, other?.run));
    }));
  }

  store.on(["runData", "compareData"], fill);
  return root;
}
