import { breakable, element } from "./dom.js";
import { plural } from "./format.js";

const MOST = 300;

// What a picture shows as rows, which are made when they are asked for.
export function dataTable(title) {
  const table = element("table");
  const more = element("p", { class: "hint" });
  const root = element("details", { class: "data", hidden: true },
    element("summary", {}, `${title} as a table`), table, more);
  let made = () => [[], []];
  const make = () => {
    if (!root.open) return;
    const [heads, rows] = made();
    table.replaceChildren(
      element("thead", {}, element("tr", {}, ...heads.map((head) => {
        return element("th", { scope: "col", class: "plain" }, head);
      }))),
      element("tbody", {}, ...rows.slice(0, MOST).map((cells) => {
        return element("tr", {}, ...cells.map((cell) => element("td", {}, ...breakable(String(cell)))));
      })));
    more.textContent = rows.length > MOST ? `The first ${MOST} of ${plural(rows.length, "row")}.` : "";
  };
  root.addEventListener("toggle", make);
  return {
    root,
    /** @param {(() => [string[], any[][]]) | null} content Heads and rows. */
    fill(content) {
      root.hidden = !content;
      made = content ?? (() => [[], []]);
      make();
    },
  };
}
