import { chooseLayer } from "./actions.js";
import { DIFFERENCES, differencesOf } from "./difference.js";
import { breakable, card, element, fillSelect } from "./dom.js";
import { formatNumber, formatShare, plural, words } from "./format.js";
import { seenFirst } from "./frames.js";
import { labelOfRun, shortRun } from "./names.js";
import { wholeFindings } from "./run_setup.js";

const MOST_ROWS = 200;
const ALONE = "Choose a second run to compare with, above: a row for each layer then says " +
  "what is different in it.";

const inBits = (value) => formatNumber(Number(value.toFixed(1)));

const SHOW = {
  dtype: (value) => value ?? "–",
  headroom: (value) => (value === null ? "–" : value === -Infinity ? "not finite" :
    value === Infinity ? "all zero" : value > 0 ? `${inBits(value)} bits` :
      `${inBits(-value)} bits too large`),
  inside: (value) => (value === null ? "none" : `numbers up to ${formatNumber(value)}`),
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
  const whole = element("p", { class: "hint" });
  const nothing = element("p", { class: "absent" }, ALONE);
  const rows = element("tbody");
  const head = element("tr");
  const table = element("table", {}, element("thead", {}, head), rows);
  const scroller = element("div", { class: "table-scroll short" }, table);
  const root = card("difference", "Differences between two runs", [by], whole, caption, nothing, scroller);
  root.classList.add("wide");

  function fill() {
    const { runData, compareData, ranges, compareRanges } = store.state;
    const both = runData && compareData;
    nothing.hidden = Boolean(both);
    for (const node of [scroller, caption, by, whole]) node.hidden = !both;
    if (!both) return;
    const own = ranges?.run === runData.run ? ranges : null;
    const others = compareRanges?.run === compareData.run ? compareRanges : null;
    const found = differencesOf(runData, compareData, own, others, by.value);
    const different = found.filter(({ differs }) => differs);
    const names = [shortRun(runData.run, compareData.run), shortRun(compareData.run, runData.run)];
    // No layer has a row with these.
    const findings = [runData, compareData].map(wholeFindings);
    whole.textContent = `Found of the run as a whole: ${findings.map((text) => text || "nothing").join(" | ")}.`;
    whole.hidden = !findings.some(Boolean);
    caption.textContent = `${plural(different.length, "layer")} of ${found.length} differ. ` +
      `Each cell: ${names.join(" | ")}. Headroom is in the dtype that a layer computes in; ` +
      "where both have enough, it is no difference. Of errors, smaller is better." +
      (found.length > MOST_ROWS ? ` The first ${MOST_ROWS} are shown.` : "");
    const labels = [labelOfRun(runData.run, compareData.run), labelOfRun(compareData.run, runData.run)];
    // What overflows inside of no layer is no column.
    const shown = DIFFERENCES.filter((column, place) => column.id !== "inside" ||
      found.some(({ cells }) => cells[place].values.some((value) => value !== null)));
    head.replaceChildren(element("th", { scope: "col", class: "plain" }, "Layer"),
      ...shown.map(({ label }) => element("th", { scope: "col", class: "plain" }, label,
        element("span", { class: "of-run" }, labels.join(" | ")))));
    const ids = new Set(shown.map(({ id }) => id));
    rows.replaceChildren(...found.slice(0, MOST_ROWS).map(({ path, cells }) => {
      return row(path, cells.filter(({ id }) => ids.has(id)), [own, others]);
    }));
  }

  // Errors are read apart from the rest, and come later.
  function textOf(id, value, note, ranges) {
    return id === "error" && !ranges ? "loading…" : SHOW[id](value) + note;
  }

  function row(path, cells, measured) {
    return element("tr", { "data-layer": path },
      element("th", { scope: "row", class: "plain" }, element("button", {
        type: "button", onclick: () => chooseLayer(store, path),
      }, ...breakable(path))),
      ...cells.map(({ id, values, size, notes }) => {
        const [one, two] = values.map((value, place) => textOf(id, value, notes[place], measured[place]));
        const same = one === two;
        return element("td", { class: size > 0 ? "differs" : null }, same ? one : `${one} | ${two}`);
      }));
  }

  store.on(["runData", "compareData", "ranges", "compareRanges"], seenFirst(root, fill));
  return root;
}
