import { element } from "./dom.js";
import { TABLES } from "./export_tables.js";
import { drawSoon } from "./frames.js";
import { pictureOf } from "./picture.js";

// A cell of text that begins so is a formula to a spreadsheet; an apostrophe says that it is text.
const FORMULA = /^[\s\0]*[=+\-@\t\r＝＋－＠]/;
// Infinities are spelled as JSON has them.
const NUMBER = /^[+-]?(\d+\.?\d*(e[+-]?\d+)?|inf)$/i;

// What JSON has no number for is written as the log's server does.
function spelled(value) {
  if (typeof value !== "number" || Number.isFinite(value)) return value;
  return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

function jsonOf(rows) {
  return JSON.stringify(rows, (_, value) => spelled(value), 1);
}

/**
 * Rows of a table as text that spreadsheets read.
 * @param {object[]} rows
 */
export function csvOf(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "object" ? JSON.stringify(value) : String(spelled(value));
    const cell = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
  };
  const lines = rows.map((row) => names.map((name) => quoted(row[name])).join(","));
  return [names.map(quoted).join(","), ...lines].join("\r\n") + "\r\n";
}

function save(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/**
 * Adds CSV and JSON to each card, and PNG to each with a picture.
 */
export function addExports(main, store) {
  const nameOf = (id, end) => {
    const run = (store.state.runData?.run ?? "runs").replace(/[^\w.-]+/g, "_");
    return `${run}-${id}.${end}`;
  };
  for (const root of main.querySelectorAll(".card")) {
    const { id } = root;
    // Where there is no room they go to the next line together.
    const group = element("span", { class: "exports" });
    root.querySelector(".card-head").append(group);
    const button = (end, title, onclick) => element("button", {
      type: "button", class: "export", "data-export": end, title, onclick,
    }, end.toUpperCase());
    const saveText = (end, type, write) => button(end, `Download these numbers as ${end.toUpperCase()}`,
      () => save(nameOf(id, end), new Blob([write(TABLES[id](store.state))], { type })));
    group.append(saveText("csv", "text/csv", csvOf), saveText("json", "application/json", jsonOf));
    if (!root.querySelector("canvas")) continue;
    group.append(button("png", "Download this picture as PNG", () => drawSoon(() => {
      /** @type {HTMLCanvasElement[]} */
      const canvases = [...root.querySelectorAll("canvas")]
        .filter((canvas) => canvas.offsetParent && canvas.width);
      if (!canvases.length) return;
      const { runData, compareData } = store.state;
      const runs = [runData, compareData].filter(Boolean).map(({ run }) => run);
      pictureOf(root, canvases, runs).toBlob((blob) => save(nameOf(id, "png"), blob));
    })));
  }
}
