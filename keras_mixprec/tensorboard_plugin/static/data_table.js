import { breakable, element } from "./dom.js";
import { plural } from "./format.js";

const MOST = 300;
// Matches cells that spreadsheets would read as formulas. An apostrophe in front of such a cell
// prevents that.
const FORMULA = /^[\s\0]*[=+\-@\t\r＝＋－＠]/;
const NUMBER = /^[+-]?(\d+\.?\d*(e[+-]?\d+)?|inf)$/i;

function csvCell(value) {
  // Spell infinity and NaN as in the log.
  const text = String(value ?? "").replace(/^(-?)Infinity$/, "$1inf").replace(/^NaN$/, "nan");
  const cell = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

/**
 * Returns rows of cells as CSV text.
 * @param {any[][]} rows
 */
export function csvOf(rows) {
  return rows.map((cells) => cells.map(csvCell).join(",") + "\r\n").join("");
}

function save(name, text) {
  const blob = new Blob([text], { type: "text/csv" });
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Returns a table with the numbers of a chart. The rows are made when the user opens the table.
export function dataTable(title) {
  const table = element("table");
  const more = element("p", { class: "hint" });
  const csv = element("button", {
    type: "button", class: "quiet", "data-export": "csv", title: "Download these numbers as CSV",
    onclick: () => save(`${title.toLowerCase().replaceAll(" ", "-")}.csv`, csvOf(content())),
  }, "CSV");
  const root = element("details", { class: "data", hidden: true },
    element("summary", {}, `${title} as a table`), csv, table, more);
  let made = () => [[], []];
  const content = () => {
    const [heads, rows] = made();
    return [heads.map((head) => [head].flat()[0]), ...rows];
  };
  const make = () => {
    if (!root.open) return;
    const [heads, rows] = made();
    const shown = (cell, place) => {
      const [, format = String] = [heads[place]].flat();
      return cell === null ? "–" : format(cell);
    };
    table.replaceChildren(
      element("thead", {}, element("tr", {}, ...heads.map((head) => {
        return element("th", { scope: "col", class: "plain" }, [head].flat()[0]);
      }))),
      element("tbody", {}, ...rows.slice(0, MOST).map((cells) => element("tr", {},
        ...cells.map((cell, place) => element("td", {}, ...breakable(shown(cell, place))))))));
    more.textContent = rows.length > MOST ? `The first ${MOST} of ${plural(rows.length, "row")}.` : "";
  };
  root.addEventListener("toggle", make);
  return {
    root,
    /**
     * @param {(() => [any[], any[][]]) | null} content Returns heads and rows. A head is a name, or a
     *   pair of a name and a function that formats the values. Missing values are `null`.
     */
    fill(content) {
      root.hidden = !content;
      made = content ?? (() => [[], []]);
      make();
    },
  };
}
