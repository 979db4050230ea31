import { chooseLayer } from "./actions.js";
import { DIFFERENCES, differencesOf } from "./difference.js";
import { breakable, card, element, fillSelect } from "./dom.js";
import { formatNumber, formatShare, plural, words } from "./format.js";
import { seenFirst } from "./frames.js";
import { labelOfRun, shortRun } from "./names.js";

const MOST_ROWS = 200;
const ALONE = "Choose a second run to compare with, above: a row for each layer then says " +
  "what is different in it.";

const SHOW = {
  dtype: (value) => value ?? "–",
  headroom: (value) => (value === null ? "–" : value === -Infinity ? "not finite" :
    value === Infinity ? "all zero" : `${formatNumber(Number(value.toFixed(1)))} bits`),
  verdicts: (value) => (value ? value.map(words).join(", ") || "none" : "–"),
  error: (value) => (value === null ? "–" : formatNumber(value)),
  flops: (value) => (value === null ? "–" : formatShare(value)),
};

export function createDifference(store) {
  const by = element("select", {
    id: "difference-by", "aria-label": "Sorted by the largest difference in",
    onchange: () => fill(),
  });
  fillSelect(by, [["all", "all columns"], ...DIFFERENCES.map(({ id, label }) => [id, label])], "all");
  const caption = element("p", { class: "hint", role: "status" });
  const nothing = element("p", { class: "absent" }, ALONE);
  const rows = element("tbody");
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...["Layer", ...DIFFERENCES.map(({ label }) => label)].map((head) => {
      return element("th", { scope: "col", class: "plain" }, head,
        head === "Layer" ? null : element("span", { class: "of-run" }));
    }))), rows);
  const scroller = element("div", { class: "table-scroll short" }, table);
  const root = card("difference", "Differences between two runs", [by], caption, nothing, scroller);
  root.classList.add("wide");

  function fill() {
    const { runData, compareData, ranges, compareRanges } = store.state;
    const both = runData && compareData;
    nothing.hidden = Boolean(both);
    scroller.hidden = caption.hidden = by.hidden = !both;
    if (!both) return;
    const own = ranges?.run === runData.run ? ranges : null;
    const others = compareRanges?.run === compareData.run ? compareRanges : null;
    const found = differencesOf(runData, compareData, own, others, by.value);
    const different = found.filter(({ differs }) => differs);
    const names = [shortRun(runData.run, compareData.run), shortRun(compareData.run, runData.run)];
    caption.textContent = `${plural(different.length, "layer")} of ${found.length} differ. ` +
      `Each cell: ${names.join(" | ")}.` +
      (found.length > MOST_ROWS ? ` The first ${MOST_ROWS} are shown.` : "");
    const labels = [labelOfRun(runData.run, compareData.run), labelOfRun(compareData.run, runData.run)];
    for (const which of table.querySelectorAll("th .of-run")) which.textContent = labels.join(" | ");
    rows.replaceChildren(...found.slice(0, MOST_ROWS).map(row));
  }

  function row({ path, cells }) {
    return element("tr", { "data-layer": path },
      element("th", { scope: "row", class: "plain" }, element("button", {
        type: "button", onclick: () => chooseLayer(store, path),
      }, ...breakable(path))),
      ...cells.map(({ id, values, size, notes }) => {
        const [one, two] = values.map((value, place) => SHOW[id](value) + notes[place]);
        const same = one === two;
        return element("td", { class: size > 0 ? "differs" : null }, same ? one : `${one} | ${two}`);
      }));
  }

  store.on(["runData", "compareData", "ranges", "compareRanges"], seenFirst(root, fill));
  return root;
}
